// Logs every operation that changes a folder, in the order in which they were made, of a program and of all that it starts;
// and lets chosen ones fail. Loaded with LD_PRELOAD; benchmarks/harness/storage.py sets it up and reads what it writes.
//   STORAGE_ROOT    the folder, absolute
//   STORAGE_SHARED  a file of 4096 zeros: the lock and the counters of all processes
//   STORAGE_LOG     gets a line an operation: kind, path, new path or "-", offset, length, where its bytes begin in
//   STORAGE_BYTES   all bytes that were written
//   FAULT_KIND=fsync,write FAULT_PATH=/a/*   of these operations, on paths below the folder that match this (glob),
//   FAULT_FIRST=1 FAULT_LAST=3               these; they are read at each operation, so that a fork may have its own
//   FAULT_THEN=write,create                  and from the first of them on all operations of these kinds
//   FAULT_ERRNO=5 | FAULT_SHORT=1 | FAULT_SECONDS=60   fail so, write half, or wait before they work
//   FAULT_KILL=12   the process that makes the operation after the first 12 is killed before it
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <limits.h>
#include <unistd.h>

struct shm { long faults; pthread_mutex_t lock; long bytes; long noted; int inited; };
static struct shm *S;
static char root[PATH_MAX]; static size_t rootlen;
static int logfd = -1, bytesfd = -1;
static __thread int inside;
#define REAL(name) static __typeof__(name) *real; if (!real) real = (__typeof__(name) *)dlsym(RTLD_NEXT, #name)

__attribute__((constructor)) static void init(void) {
  const char *r = getenv("STORAGE_ROOT"), *s = getenv("STORAGE_SHARED");
  if (!r || !s) return;
  strncpy(root, r, sizeof root - 1); rootlen = strlen(root);
  int fd = syscall(SYS_openat, AT_FDCWD, s, O_RDWR | O_CLOEXEC, 0600);
  if (fd < 0) return;
  S = mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  syscall(SYS_close, fd);
  if (S == MAP_FAILED) { S = 0; return; }
  if (!__sync_lock_test_and_set(&S->inited, 1)) {
    pthread_mutexattr_t a; pthread_mutexattr_init(&a);
    pthread_mutexattr_setpshared(&a, PTHREAD_PROCESS_SHARED); pthread_mutexattr_setrobust(&a, PTHREAD_MUTEX_ROBUST);
    pthread_mutex_init(&S->lock, &a);
  }
  char *e;
  if ((e = getenv("STORAGE_LOG"))) { int f = syscall(SYS_openat, AT_FDCWD, e, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600); logfd = fcntl(f, F_DUPFD_CLOEXEC, 900); syscall(SYS_close, f); }
  if ((e = getenv("STORAGE_BYTES"))) { int f = syscall(SYS_openat, AT_FDCWD, e, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600); bytesfd = fcntl(f, F_DUPFD_CLOEXEC, 901); syscall(SYS_close, f); }
}
static int under(const char *p) { return S && rootlen && !strncmp(p, root, rootlen) && (p[rootlen] == '/' || !p[rootlen]); }
static int resolve(int dir, const char *p, char *out) {  // lexical; folder part by realpath of dir fd
  if (!S || !p) return 0;
  char base[PATH_MAX];
  if (p[0] == '/') snprintf(out, PATH_MAX, "%s", p);
  else {
    if (dir == AT_FDCWD) { if (syscall(SYS_getcwd, base, sizeof base) < 0) return 0; }
    else { char l[64]; snprintf(l, 64, "/proc/self/fd/%d", dir); ssize_t n = syscall(SYS_readlinkat, AT_FDCWD, l, base, sizeof base - 1); if (n <= 0) return 0; base[n] = 0; }
    snprintf(out, PATH_MAX, "%s/%s", base, p);
  }
  // normalise "." and ".." and "//"
  char *parts[512]; int n = 0; char tmp[PATH_MAX]; strcpy(tmp, out); char *save, *t;
  for (t = strtok_r(tmp, "/", &save); t && n < 512; t = strtok_r(0, "/", &save)) {
    if (!strcmp(t, ".")) continue;
    if (!strcmp(t, "..")) { if (n) n--; continue; }
    parts[n++] = t;
  }
  char *o = out; for (int i = 0; i < n; i++) o += sprintf(o, "/%s", parts[i]); if (!n) strcpy(out, "/");
  return under(out);
}
static int fdpath(int fd, char *out) {
  if (!S) return 0;
  char l[64]; snprintf(l, 64, "/proc/self/fd/%d", fd);
  ssize_t n = syscall(SYS_readlinkat, AT_FDCWD, l, out, PATH_MAX - 1); if (n <= 0) return 0; out[n] = 0;
  return under(out);
}
static void begin(void) { if (pthread_mutex_lock(&S->lock) == EOWNERDEAD) pthread_mutex_consistent(&S->lock); }
static void end(void) { pthread_mutex_unlock(&S->lock); }
static long number(const char *name, long otherwise) { const char *e = getenv(name); return e ? atol(e) : otherwise; }
static int is_among(const char *kinds, const char *kind) {
  char all[256], one[64]; snprintf(all, 256, ",%s,", kinds ? kinds : ""); snprintf(one, 64, ",%s,", kind);
  return strstr(all, one) != 0;
}
// Called with the lock. Returns: 0 go on; >0 errno to fail with; -1 short write
static int gate(const char *op, const char *path) {
  long last = number("FAULT_KILL", -1);
  if (last >= 0 && S->noted == last) kill(getpid(), SIGKILL);
  long first = number("FAULT_FIRST", -1), seconds = number("FAULT_SECONDS", 0);
  if (first < 0) return 0;
  const char *kinds = getenv("FAULT_KIND"), *paths = getenv("FAULT_PATH"), *then = getenv("FAULT_THEN");
  int chosen = (!kinds || is_among(kinds, op)) && (!paths || !fnmatch(paths, path[rootlen] ? path + rootlen : "/", 0));
  if (!chosen && !(S->faults >= first && is_among(then, op))) return 0;
  if (++S->faults < first || S->faults > number("FAULT_LAST", first)) return 0;
  if (seconds) { end(); sleep(seconds); begin(); return 0; }
  return number("FAULT_SHORT", 0) ? -1 : number("FAULT_ERRNO", 0);
}
static void note(const char *op, long ret, const char *p, const char *q, long off, long len, const void *data) {
  if (logfd < 0 || ret < 0 || strstr(p, " (deleted)")) return;
  int e = errno; long at = -1;
  if (data && len > 0 && bytesfd >= 0) { at = S->bytes; const char *d = data; long left = len; while (left > 0) { long w = syscall(SYS_write, bytesfd, d, left); if (w <= 0) break; d += w; left -= w; } S->bytes += len; }
  char b[3 * PATH_MAX]; int k = snprintf(b, sizeof b, "%s\t%s\t%s\t%ld\t%ld\t%ld\n", op, p + rootlen, q ? q + rootlen : "-", off, len, at);
  syscall(SYS_write, logfd, b, k); S->noted++; errno = e;
}
static long inode_at(const char *p) { struct stat s; return lstat(p, &s) ? -1 : (long)s.st_ino; }

static int do_open(int dir, const char *p, int flags, mode_t m) {
  char a[PATH_MAX]; int fd;
  if (!inside && S && (flags & (O_CREAT | O_TRUNC)) && resolve(dir, p, a)) {
    begin(); long before = inode_at(a);
    if (before >= 0 && !(flags & O_TRUNC)) { fd = syscall(SYS_openat, dir, p, flags, m); end(); return fd; }  // changes nothing
    int g = gate(before < 0 ? "create" : "truncate", a);
    if (g > 0) { end(); errno = g; return -1; }
    fd = syscall(SYS_openat, dir, p, flags, m);
    if (fd >= 0) note(before < 0 ? "create" : "truncate", 0, a, 0, 0, 0, 0);
    end(); return fd;
  }
  return syscall(SYS_openat, dir, p, flags, m);
}
#define MODE mode_t m = 0; if (f & (O_CREAT | __O_TMPFILE)) { va_list v; va_start(v, f); m = va_arg(v, mode_t); va_end(v); }
int open(const char *p, int f, ...) { MODE return do_open(AT_FDCWD, p, f, m); }
int open64(const char *p, int f, ...) { MODE return do_open(AT_FDCWD, p, f | O_LARGEFILE, m); }
int openat(int d, const char *p, int f, ...) { MODE return do_open(d, p, f, m); }
int openat64(int d, const char *p, int f, ...) { MODE return do_open(d, p, f | O_LARGEFILE, m); }
int creat(const char *p, mode_t m) { return do_open(AT_FDCWD, p, O_CREAT | O_WRONLY | O_TRUNC, m); }
static int fopen_flags(const char *mode) { int plus = strchr(mode, '+') != 0; return mode[0] == 'r' ? (plus ? O_RDWR : O_RDONLY) : (plus ? O_RDWR : O_WRONLY) | O_CREAT | (mode[0] == 'w' ? O_TRUNC : O_APPEND); }
FILE *fopen(const char *p, const char *mode) { REAL(fopen); char a[PATH_MAX];
  if (S && mode[0] != 'r' && resolve(AT_FDCWD, p, a)) { int fd = do_open(AT_FDCWD, p, fopen_flags(mode), 0666); if (fd < 0) return 0; return fdopen(fd, mode); }
  return real(p, mode); }
FILE *fopen64(const char *p, const char *mode) { REAL(fopen64); char a[PATH_MAX];
  if (S && mode[0] != 'r' && resolve(AT_FDCWD, p, a)) { int fd = do_open(AT_FDCWD, p, fopen_flags(mode), 0666); if (fd < 0) return 0; return fdopen(fd, mode); }
  return real(p, mode); }

ssize_t write(int fd, const void *b, size_t n) {
  char a[PATH_MAX];
  if (!S || !fdpath(fd, a)) return syscall(SYS_write, fd, b, n);
  begin(); int g = gate("write", a);
  if (g > 0) { end(); errno = g; return -1; }
  if (g < 0 && n > 1) n /= 2;
  long r = syscall(SYS_write, fd, b, n); int e = errno;
  if (r > 0) note("write", r, a, 0, lseek(fd, 0, SEEK_CUR) - r, r, b);
  end(); errno = e; return r;
}
static ssize_t do_pwrite(int fd, const void *b, size_t n, off_t o) {
  char a[PATH_MAX];
  if (!S || !fdpath(fd, a)) return syscall(SYS_pwrite64, fd, b, n, o);
  begin(); int g = gate("write", a);
  if (g > 0) { end(); errno = g; return -1; }
  if (g < 0 && n > 1) n /= 2;
  long r = syscall(SYS_pwrite64, fd, b, n, o); int e = errno;
  if (r > 0) note("write", r, a, 0, o, r, b);
  end(); errno = e; return r;
}
ssize_t pwrite(int fd, const void *b, size_t n, off_t o) { return do_pwrite(fd, b, n, o); }
ssize_t pwrite64(int fd, const void *b, size_t n, off_t o) { return do_pwrite(fd, b, n, o); }
ssize_t writev(int fd, const struct iovec *v, int c) {
  char a[PATH_MAX];
  if (!S || !fdpath(fd, a)) return syscall(SYS_writev, fd, v, c);
  size_t n = 0; for (int i = 0; i < c; i++) n += v[i].iov_len; char *t = malloc(n ? n : 1), *o = t;
  for (int i = 0; i < c; i++) { memcpy(o, v[i].iov_base, v[i].iov_len); o += v[i].iov_len; }
  ssize_t r = write(fd, t, n); int e = errno; free(t); errno = e; return r;
}
static int do_sync(int fd, int nr, const char *op) {
  char a[PATH_MAX];
  if (!S || !fdpath(fd, a)) return syscall(nr, fd);
  begin(); int g = gate("fsync", a);
  if (g > 0) { end(); errno = g; return -1; }
  int r = syscall(nr, fd); note("fsync", r, a, 0, 0, 0, 0); end(); return r;
}
int fsync(int fd) { return do_sync(fd, SYS_fsync, "fsync"); }
int fdatasync(int fd) { return do_sync(fd, SYS_fdatasync, "fsync"); }
static int do_ftruncate(int fd, off_t n) {
  char a[PATH_MAX];
  if (!S || !fdpath(fd, a)) return syscall(SYS_ftruncate, fd, n);
  begin(); int g = gate("ftruncate", a);
  if (g > 0) { end(); errno = g; return -1; }
  int r = syscall(SYS_ftruncate, fd, n); note("ftruncate", r, a, 0, n, 0, 0); end(); return r;
}
int ftruncate(int fd, off_t n) { return do_ftruncate(fd, n); }
int ftruncate64(int fd, off_t n) { return do_ftruncate(fd, n); }
static int two(const char *op, int d1, const char *p, int d2, const char *q, int nr, int flags) {
  char a[PATH_MAX], b[PATH_MAX]; int ia = resolve(d1, p, a), ib = resolve(d2, q, b);
  if (!S || !(ia || ib)) return nr == SYS_renameat2 ? syscall(nr, d1, p, d2, q, flags) : syscall(nr, d1, p, d2, q, flags);
  begin(); int g = gate(op, b);
  if (g > 0) { end(); errno = g; return -1; }
  int r = syscall(nr, d1, p, d2, q, flags); int e = errno;
  if (!r) note(op, r, a, b, 0, 0, 0);
  end(); errno = e; return r;
}
int rename(const char *p, const char *q) { return two("rename", AT_FDCWD, p, AT_FDCWD, q, SYS_renameat2, 0); }
int renameat(int d, const char *p, int e, const char *q) { return two("rename", d, p, e, q, SYS_renameat2, 0); }
int renameat2(int d, const char *p, int e, const char *q, unsigned f) { return two("rename", d, p, e, q, SYS_renameat2, f); }
int link(const char *p, const char *q) { return two("link", AT_FDCWD, p, AT_FDCWD, q, SYS_linkat, 0); }
int linkat(int d, const char *p, int e, const char *q, int f) { return two("link", d, p, e, q, SYS_linkat, f); }
static int gone(int d, const char *p, int flags) {
  char a[PATH_MAX]; const char *op = flags & AT_REMOVEDIR ? "rmdir" : "unlink";
  if (!S || !resolve(d, p, a)) return syscall(SYS_unlinkat, d, p, flags);
  begin(); long ino = inode_at(a);
  if (ino < 0) { int r = syscall(SYS_unlinkat, d, p, flags), e = errno; end(); errno = e; return r; }
  int g = gate(op, a);
  if (g > 0) { end(); errno = g; return -1; }
  int r = syscall(SYS_unlinkat, d, p, flags), e = errno; if (!r) note(op, r, a, 0, 0, 0, 0); end(); errno = e; return r;
}
int unlink(const char *p) { return gone(AT_FDCWD, p, 0); }
int unlinkat(int d, const char *p, int f) { return gone(d, p, f); }
int rmdir(const char *p) { return gone(AT_FDCWD, p, AT_REMOVEDIR); }
int remove(const char *p) { struct stat s; if (lstat(p, &s)) return -1; return gone(AT_FDCWD, p, S_ISDIR(s.st_mode) ? AT_REMOVEDIR : 0); }
static int made(int d, const char *p, mode_t m) {
  char a[PATH_MAX];
  if (!S || !resolve(d, p, a)) return syscall(SYS_mkdirat, d, p, m);
  begin(); if (inode_at(a) >= 0) { int r = syscall(SYS_mkdirat, d, p, m), e = errno; end(); errno = e; return r; }
  int g = gate("mkdir", a);
  if (g > 0) { end(); errno = g; return -1; }
  int r = syscall(SYS_mkdirat, d, p, m), e = errno; if (!r) note("mkdir", r, a, 0, 0, 0, 0); end(); errno = e; return r;
}
int mkdir(const char *p, mode_t m) { return made(AT_FDCWD, p, m); }
int mkdirat(int d, const char *p, mode_t m) { return made(d, p, m); }
int symlink(const char *t, const char *p) { char a[PATH_MAX];
  if (!S || !resolve(AT_FDCWD, p, a)) return syscall(SYS_symlinkat, t, AT_FDCWD, p);
  begin(); int g = gate("symlink", a); if (g > 0) { end(); errno = g; return -1; }
  int r = syscall(SYS_symlinkat, t, AT_FDCWD, p); note("symlink", r, a, 0, 0, 0, 0); end(); return r; }
ssize_t sendfile(int o, int i, off_t *off, size_t n) {
  char a[PATH_MAX];
  if (!S || !fdpath(o, a)) return syscall(SYS_sendfile, o, i, off, n);
  errno = EINVAL; return -1;  // callers fall back to read and write
}
ssize_t sendfile64(int o, int i, off64_t *off, size_t n) { return sendfile(o, i, (off_t *)off, n); }
ssize_t copy_file_range(int i, off64_t *a1, int o, off64_t *a2, size_t n, unsigned f) {
  char a[PATH_MAX];
  if (!S || !fdpath(o, a)) return syscall(SYS_copy_file_range, i, a1, o, a2, n, f);
  errno = EINVAL; return -1;
}
