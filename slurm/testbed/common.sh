# shellcheck shell=bash disable=SC2034
# Sourced by up, down, kill-node and start-node: where things are, and which processes are the testbed's.

folder=$(realpath -m -- "${SHARDWISE_TESTBED:-/var/lib/shardwise-testbed}")
conf=$folder/slurm.conf
marker=$folder/.shardwise-testbed # nothing is removed from a folder without it
hosts=/etc/hosts
hosts_begin="# shardwise testbed in $folder: begin"
hosts_end="# shardwise testbed in $folder: end"
daemon_path=/usr/sbin:/usr/bin:/sbin:/bin # all of the caller's environment that daemons get, and could hand on to jobs
nodes=(dgx01 dgx02 dgx03 dgx04)
export PATH=$PATH:/usr/sbin:/sbin # where Debian keeps the daemons, and su without "-" leaves out

refuse() {
    echo "${0##*/}: $*" >&2
    exit 2
}

need_root() {
    [[ $(id -u) -eq 0 && -e /etc/debian_version ]] || refuse "needs root on Debian or Ubuntu"
    # Slurm reads neither quotes nor long paths of sockets.
    [[ $folder =~ ^/[A-Za-z0-9._/-]{1,60}$ ]] || refuse "not a path for a testbed: $folder"
}

# Arguments of a process, one a line; nothing for those that are gone, and for zombies, which kill -0 would report as
# alive where PID 1 reaps nothing.
arguments() {
    { tr '\0' '\n' <"/proc/$1/cmdline"; } 2>/dev/null || true
}

# pids NAME ours|other: daemons of that name that were started on this folder, or on another configuration. Those of
# another network, in a container, are in nobody's way.
pids() {
    local process name pid whose
    for process in /proc/[0-9]*; do
        { read -r name <"$process/comm"; } 2>/dev/null || continue
        [[ $name == "$1" && $process/ns/net -ef /proc/self/ns/net ]] || continue
        pid=${process##*/}
        whose=other
        case $(arguments "$pid")$'\n' in
        $'\n') continue ;;
        *$'\n'"$conf"$'\n'* | *$'\n'"--socket=$folder/munge/socket"$'\n'*) whose=ours ;;
        esac
        if [[ $whose == "$2" ]]; then echo "$pid"; fi
    done
}

# Every process on a node, the stepds and whatever its jobs started included: they share its UTS namespace. A number of
# a namespace is given out again when nobody is in it any more, so the hostname has to be the node's as well.
node_pids() {
    local namespace process pid
    namespace=$(cat "$folder/nodes/$1" 2>/dev/null) || return 0
    # One find, for there may be thousands of processes; it takes brackets for a pattern.
    while read -r process; do
        pid=${process//[!0-9]/}
        if [[ $(nsenter --target "$pid" --uts hostname 2>/dev/null) == "$1" ]]; then echo "$pid"; fi
    done < <(find /proc/[0-9]*/ns/uts -maxdepth 0 -lname "${namespace/[/\\[}" 2>/dev/null)
}

# Stopped first, killed then: a stepd that sees its tasks die would report them, and a power loss reports nothing.
kill_node() {
    local found
    while found=$(node_pids "$1") && [[ -n $found ]]; do
        # shellcheck disable=SC2086
        kill -STOP $found 2>/dev/null || true
        # shellcheck disable=SC2086
        kill -KILL $found 2>/dev/null || true
        sleep 0.05
    done
    rm -f "$folder/nodes/$1"
}

check_node() {
    [[ $# -eq 1 && " ${nodes[*]} " == *" $1 "* ]] || refuse "usage: ${0##*/} ${nodes[0]} | … | ${nodes[-1]}"
    [[ -e $marker ]] || refuse "no testbed in $folder: slurm/testbed/up starts one"
    export SLURM_CONF=$conf
}

# Waits until Slurm has the nodes named, 60 s at most: idle, or at work already for a job that waited. "idle*" is neither.
wait_for_nodes() {
    local state node left deadline=$((SECONDS + 60))
    while
        state=$(sinfo --noheader --Node --format='%N %T' 2>/dev/null || true)
        left=()
        for node; do
            grep -qxE "$node (idle|mixed|allocated|completing)" <<<"$state" || left+=("$node")
        done
        [[ ${#left[@]} -gt 0 ]]
    do
        if [[ $SECONDS -ge $deadline ]]; then
            echo "${0##*/}: not up after 60 s: ${left[*]}" >&2
            return 1
        fi
        sleep 0.25
    done
}
