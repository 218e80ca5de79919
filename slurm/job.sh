# shellcheck shell=bash
# What the templates source, on the first node of a job, outside of any container: bash and Slurm's own commands only.
#
# A job has a folder, runs/jobs/<run id>, that outlives its requeues (src/shardwise/run_dir/events.py says what the ranks
# write there). What ends it is decided here: by `done`, then by the exit codes that the ranks have noted, never by 0.

set -uo pipefail

say() { printf 'shardwise: %s\n' "$*"; }
refuse() { say "not requeued: exit code 2: $*" >&2; exit 2; }

if [[ -z ${SLURM_JOB_ID:-} || -z ${SLURM_NODEID:-} ]]; then
    say "this is a batch script: sbatch --nodes=N $0 …" >&2
    exit 2
fi

home=${SHARDWISE_HOME:-$SLURM_SUBMIT_DIR}
# An array's last member has the array's own number for its own, by which Slurm would take all of them
id=$SLURM_JOB_ID
[[ -z ${SLURM_ARRAY_JOB_ID:-} ]] || id=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
RESTARTS_WITHOUT_PROGRESS=${RESTARTS_WITHOUT_PROGRESS:-3}
[[ $RESTARTS_WITHOUT_PROGRESS =~ ^[0-9]{1,6}$ ]] ||
    refuse "RESTARTS_WITHOUT_PROGRESS=$RESTARTS_WITHOUT_PROGRESS: must be a whole number"

# A signal to the batch script (scancel --batch, --full) is meant for the run. On SIGTERM srun would kill its tasks at once:
# it has a process group of its own (-m), and is told in words that it passes on.
set -m
child='' told=''
pass_on() { # SIGNAL
    [[ $1 == USR1 ]] || told=$1
    [[ -z $child ]] || kill -"$1" "$child" 2> /dev/null
}
trap 'pass_on USR2' TERM USR2 HUP INT
trap 'pass_on USR1' USR1

read_number() { # FILE
    local number=
    [[ -r $1 ]] && read -r number < "$1"
    [[ $number =~ ^[0-9]+$ ]] && echo "$number" || echo 0
}

# Before the run. The job's folder and environment, the words for srun and for the program, and a look at the nodes.
begin() { # OVERRIDE...
    local run_id=slurm-$id
    job=$PWD/runs/jobs/$run_id
    set_aside
    mkdir -p "$job" || refuse "cannot write $job: submit from a folder that all nodes share"
    if [[ -e $job/done ]]; then
        say "$run_id is done already: to train further, sbatch again with its name=, resume=auto and a larger max_steps="
        exit 0
    fi

    start=$(($(read_number "$job/starts") + 1))
    local fruitless=0
    ((start == 1)) || fruitless=$(without_progress)
    local tasks=$(((${SLURM_NTASKS:-1} + SLURM_JOB_NUM_NODES - 1) / SLURM_JOB_NUM_NODES))
    tasks=${SLURM_NTASKS_PER_NODE:-$tasks}
    echo "$start" > "$job/starts"
    echo "$fruitless" > "$job/without-progress"
    read_number "$job/saved" > "$job/saved-before"
    say "start $start of $run_id on $SLURM_JOB_NODELIST ($(date '+%F %T')), tasks a node: $tasks"
    stop_after "$fruitless" 1
    load_environment

    export SHARDWISE_JOB_DIR=$job SHARDWISE_START=$start
    export PYTHONPATH=$home/src:$home${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1

    # srun would take one CPU a task, or those that a sharing job asked for: all that are there
    local cpus=$((SLURM_CPUS_ON_NODE / tasks))
    ((cpus > 0)) || cpus=1
    if [[ -z ${OMP_NUM_THREADS:-} ]]; then
        export OMP_NUM_THREADS=$(($(nproc --all) / tasks))
        ((OMP_NUM_THREADS > cpus)) && OMP_NUM_THREADS=$cpus
        ((OMP_NUM_THREADS > 0)) || OMP_NUM_THREADS=1
    fi
    # One rank that ends, ends the others a minute later: they have said why they leave, or hang in a collective
    SRUN=(--cpus-per-task="$cpus" --kill-on-bad-exit=0 --wait=60 --export=ALL)
    local python=${PYTHON:-}
    if [[ -n ${CONTAINER:-} ]]; then
        local names
        names=$(compgen -e | grep -E '^(CUDA|HF|HYDRA|MASTER|NCCL|OMP|PYTHON|PYTORCH|SHARDWISE|TORCH|WANDB)_?' | paste -sd,)
        SRUN+=(--container-image="$CONTAINER" --container-workdir="$PWD" --container-env="$names"
            --container-mounts="$home:$home,$PWD:$PWD${CONTAINER_MOUNTS:+,$CONTAINER_MOUNTS}")
    elif [[ -z $python && -x $home/.venv/bin/python ]]; then
        python=$home/.venv/bin/python
    fi
    PYTHON=${python:-python3}
    local word cluster=${CLUSTER:+cluster=$CLUSTER} profiler=()
    for word; do
        [[ $word != cluster=* ]] || cluster=
        [[ $word != profile.tool=nsys ]] || profiler=(nsys profile --trace=cuda,nvtx,osrt --capture-range=cudaProfilerApi
            --capture-range-end=stop --cuda-graph-trace=node --force-overwrite=true
            "--output=${job//%/%%}/profile/rank-%q{SLURM_PROCID}")
    done
    if ((${#profiler[@]})); then
        mkdir -p "$job/profile"
        [[ -n ${CONTAINER:-} ]] || command -v nsys > /dev/null ||
            refuse "profile.tool=nsys: there is no nsys on the PATH of $(hostname)"
        say "the reports of nsys come into $job/profile; nsys stats and nsys-ui read them"
    fi
    # shellcheck disable=SC2034 # for the templates
    TRAIN=("${profiler[@]}" "$PYTHON" "$home/train.py" ${cluster:+"$cluster"})

    look_at_nodes ${cluster:+"$cluster"} "$@"
    [[ -z $told ]] || end 140
}

load_environment() { # SHARDWISE_MODULES and SHARDWISE_PROLOG, for the run's processes on all nodes, outside of a container
    local file name names=()
    read -ra names <<< "${SHARDWISE_MODULES:-}"
    set +u # what is run here is not ours
    for file in "$MODULESHOME/init/bash" /etc/profile.d/{modules,lmod,z00_lmod}.sh; do
        ((${#names[@]} == 0)) || declare -F module > /dev/null && break
        # shellcheck disable=SC1090
        [[ ! -r $file ]] || . "$file"
    done
    for name in "${names[@]}"; do
        module load "$name" || refuse "module load $name has failed on $(hostname)"
    done
    if [[ -n ${SHARDWISE_PROLOG:-} ]]; then # the user's own code, as in a batch script of theirs
        eval "$SHARDWISE_PROLOG" || refuse "prolog=$SHARDWISE_PROLOG has failed on $(hostname)"
    fi
    set -u
}

set_aside() { # Another job's folder. Slurm gives its numbers out again when its controller is reset
    local number=1
    [[ ${SLURM_RESTART_COUNT:-0} == 0 && -e $job/starts ]] || return 0
    while [[ -e $job-earlier-$number ]]; do number=$((number + 1)); done
    mv "$job" "$job-earlier-$number" || refuse "cannot move $job, which is another job's, out of the way"
    say "an earlier job had this number: its folder is $job-earlier-$number now"
}

look_at_nodes() { # OVERRIDE...
    local word wanted=0
    ((SLURM_JOB_NUM_NODES > 1)) && wanted=1
    for word; do
        [[ ${word,,} == preflight=true ]] && wanted=1
        [[ ${word,,} == preflight=false ]] && wanted=0
    done
    ((wanted)) || return 0
    rm -f "$job/bad-nodes"
    srun "${SRUN[@]}" "$PYTHON" -m shardwise preflight "$@"
    local code=$?
    ((code == 0)) || end "$code"
}

finish() { # THE PROCESS OF SRUN. As long as it lives: a signal ends bash's wait
    local code
    child=$1
    while wait "$child"; code=$?; kill -0 "$child" 2> /dev/null; do :; done
    child=''
    end "$code"
}

# After the run: done, or run it again, or leave it.
end() { # SRUN'S EXIT CODE
    local code=$1 word said=
    if [[ -e $job/done ]]; then
        say "done"
        exit 0
    fi
    # What is nobody's consequence first: a mistake, numbers that are no numbers, no memory, a bad node, saved, hung
    for word in 2 3 4 7 5 6 1; do
        if [[ -e $job/start-$start/code-$word ]]; then
            code=$word
            IFS= read -r said < "$job/start-$start/code-$word"
            break
        fi
    done
    case $code in
        0) say "srun ended with 0, and the run has not said that it is done"; code=1 ;;
        2 | 3 | 4) say "not requeued: exit code $code: ${said:-the lines above say why}"; exit "$code" ;;
        7) [[ -s $job/bad-nodes ]] || { say "not requeued: exit code 7: $said"; exit 7; } ;;
    esac
    ((code != 140)) || said=${said:-SIGUSR2 before training began: --time has to be longer than --signal comes early}
    said=${said:-no rank has said why}
    local state
    state=$(patiently squeue --noheader --jobs="$id" --format=%T)
    if [[ $state != RUNNING ]]; then # Slurm has taken it back already, or somebody has cancelled it
        say "exit code $code: $said; Slurm itself ends this job, or starts it again${state:+ (its state is $state)}"
        exit "$code"
    fi
    stop_after "$(without_progress)" "$code" "$said"
    local without= # before the requeue: what this script starts then is killed
    if [[ -s $job/bad-nodes ]]; then
        without=$(without_bad_nodes)
        [[ -n $without ]] || { say "not requeued: exit code $code: $said; too few nodes are left without it"; exit "$code"; }
    fi
    say "exit code $code: $said; requeued"
    if ! patiently scontrol requeue "$id"; then
        say "not requeued: Slurm refuses it; the same sbatch line with resume=auto and name= goes on"
        exit "$code"
    fi
    [[ -z $without ]] || exclude "$without"
    sleep 300 # Slurm ends this script
    exit "$code"
}

without_progress() { # How many starts in a row, this one too, have saved nothing new
    (($(read_number "$job/saved") > $(read_number "$job/saved-before"))) && echo 0 && return
    echo $(($(read_number "$job/without-progress") + 1))
}

stop_after() { # STARTS EXIT-CODE [REASON]
    (($1 > RESTARTS_WITHOUT_PROGRESS)) || return 0
    local have="restarts have"
    ((RESTARTS_WITHOUT_PROGRESS == 1)) && have="restart has"
    say "not requeued: $RESTARTS_WITHOUT_PROGRESS $have saved nothing new: exit code $2${3:+: $3}"
    exit "$2"
}

patiently() { # COMMAND... Slurm's controller may be away for a moment
    local _
    for _ in {1..6}; do
        "$@" && return
        sleep 10
    done
    return 1
}

without_bad_nodes() { # What is to be left out from now on, with what the user has left out; nothing if too few are left
    local asked out left
    asked=$(scontrol --oneliner show job "$id" | sed -n 's/.* ExcNodeList=\([^ ]*\).*/\1/p')
    out=$({ [[ -z $asked || $asked == "(null)" ]] || scontrol show hostnames "$asked"; cat "$job/bad-nodes"; } | sort -u)
    left=$(sinfo --noheader --Node --partition="$SLURM_JOB_PARTITION" --format=%N | sort -u | grep -cvxF "$out")
    ((left >= SLURM_JOB_NUM_NODES)) && echo "${out//$'\n'/,}"
}

exclude() { # NODES. Of a job that waits again; as long as this script is left alive after a requeue it may say so
    local _
    for _ in {1..20}; do
        scontrol update JobId="$id" ExcNodeList="$1" 2> /dev/null && say "without $1 from now on" && return
        sleep 0.2
    done
    say "Slurm does not take $1 out of the job: scontrol update JobId=$id ExcNodeList=$1"
}
