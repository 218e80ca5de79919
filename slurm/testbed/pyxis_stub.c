/*
 * Knows the flags that NVIDIA pyxis gives to srun, refuses what pyxis refuses at a glance, and runs no container: tasks
 * see what arrived in SHARDWISE_STUB_CONTAINER_IMAGE, _MOUNTS, _WORKDIR, _NAME and _ENV. `up` compiles and loads it.
 */
#include <slurm/spank.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

SPANK_PLUGIN(shardwise_pyxis_stub, 1)

enum { IMAGE, MOUNTS, WORKDIR, NAME, ENV, WITH_VARIABLE, FLAG = WITH_VARIABLE };

static const char *const variables[WITH_VARIABLE] = {
    "SHARDWISE_STUB_CONTAINER_IMAGE", "SHARDWISE_STUB_CONTAINER_MOUNTS", "SHARDWISE_STUB_CONTAINER_WORKDIR",
    "SHARDWISE_STUB_CONTAINER_NAME",  "SHARDWISE_STUB_CONTAINER_ENV",
};
static char *given[WITH_VARIABLE];

static int flag(int which, const char *value, int remote)
{
    (void)which, (void)value, (void)remote;
    return 0;
}

static int starts_a_path(const char *value)
{
    return *value == '.' || *value == '/';
}

/* SRC[:DST[:FLAGS]],… with paths, "tmpfs" or "umount" as SRC. */
static int good_mounts(const char *value)
{
    char *copy = strdup(value), *rest = copy, *entry;
    int good = copy != NULL;

    while (good && (entry = strsep(&rest, ",")) != NULL) {
        const char *source = strsep(&entry, ":");
        const char *target = entry != NULL ? strsep(&entry, ":") : source;

        good = starts_a_path(target) &&
               (starts_a_path(source) || strcmp(source, "tmpfs") == 0 || strcmp(source, "umount") == 0);
    }
    free(copy);
    return good;
}

/* Slurm may say the same thing twice. */
static int option(int which, const char *value, int remote)
{
    (void)remote;
    if (value == NULL || *value == '\0') {
        slurm_error("pyxis stub: a --container option without its value");
        return -1;
    }
    if (given[which] != NULL && strcmp(given[which], value) != 0) {
        slurm_error("pyxis stub: \"%s\" and \"%s\" for the same --container option", given[which], value);
        return -1;
    }
    if (which == MOUNTS && !good_mounts(value)) {
        slurm_error("pyxis stub: --container-mounts: not SRC:DST[:FLAGS][,SRC:DST…] of paths: %s", value);
        return -1;
    }
    if (given[which] == NULL)
        given[which] = strdup(value);
    return 0;
}

struct spank_option spank_options[] = {
    {"container-image", "[USER@][REGISTRY#]IMAGE[:TAG]|PATH", "[pyxis stub] image", 1, IMAGE, option},
    {"container-mounts", "SRC:DST[:FLAGS][,SRC:DST...]", "[pyxis stub] bind mounts", 1, MOUNTS, option},
    {"container-workdir", "PATH", "[pyxis stub] working directory", 1, WORKDIR, option},
    {"container-name", "NAME", "[pyxis stub] name", 1, NAME, option},
    {"container-env", "NAME[,NAME...]", "[pyxis stub] variables the host decides", 1, ENV, option},
    {"container-mount-home", NULL, "[pyxis stub] mount the home directory", 0, FLAG, flag},
    {"no-container-mount-home", NULL, "[pyxis stub] do not", 0, FLAG, flag},
    {"container-writable", NULL, "[pyxis stub] writable root file system", 0, FLAG, flag},
    {"container-readonly", NULL, "[pyxis stub] read-only root file system", 0, FLAG, flag},
    {"container-remap-root", NULL, "[pyxis stub] be root inside", 0, FLAG, flag},
    {"no-container-remap-root", NULL, "[pyxis stub] do not", 0, FLAG, flag},
    {"container-entrypoint", NULL, "[pyxis stub] run the image's entrypoint", 0, FLAG, flag},
    {"no-container-entrypoint", NULL, "[pyxis stub] do not", 0, FLAG, flag},
    SPANK_OPTIONS_TABLE_END,
};

/* In the stepd, before tasks are forked. What a step does not say is not inherited from a step around it. */
int slurm_spank_user_init(spank_t spank, int argc, char **argv)
{
    (void)argc, (void)argv;
    for (int which = 0; which < WITH_VARIABLE; which++) {
        if (given[which] != NULL)
            spank_setenv(spank, variables[which], given[which], 1);
        else
            spank_unsetenv(spank, variables[which]);
    }
    return 0;
}
