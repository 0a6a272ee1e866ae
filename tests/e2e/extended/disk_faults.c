/* Preloaded into a process: calls that change a disk fail, or kill the process before they happen.
 *
 * DISK_FAULT="CALL PART NTH ERRNO": the NTH time that CALL (or "any") is about a path that has PART
 * in it, and every time after it. ERRNO 0 kills.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

static int seen;

static int fails(const char *call, const char *path) {
  char wanted[16], part[256];
  int nth, code;
  const char *fault = getenv("DISK_FAULT");
  if (!fault || sscanf(fault, "%15s %255s %d %d", wanted, part, &nth, &code) != 4) return 0;
  if (strcmp(wanted, "any") && strcmp(wanted, call)) return 0;
  if (!strstr(path, part) || ++seen < nth) return 0;
  if (!code) kill(getpid(), SIGKILL);
  errno = code;
  return 1;
}

static int fails_at(const char *call, int file) {
  char link[64], path[4096];
  snprintf(link, sizeof link, "/proc/self/fd/%d", file);
  ssize_t length = readlink(link, path, sizeof path - 1);
  if (length < 0) return 0;
  path[length] = 0;
  return fails(call, path);
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

int fsync(int file) { return fails_at("fsync", file) ? -1 : REAL(fsync)(file); }
int unlink(const char *path) { return fails("unlink", path) ? -1 : REAL(unlink)(path); }
int rename(const char *from, const char *to) {
  return fails("rename", to) ? -1 : REAL(rename)(from, to);
}
int ftruncate64(int file, off64_t size) {
  return fails_at("ftruncate", file) ? -1 : REAL(ftruncate64)(file, size);
}
ssize_t write(int file, const void *bytes, size_t count) {
  return fails_at("write", file) ? -1 : REAL(write)(file, bytes, count);
}
ssize_t pwrite64(int file, const void *bytes, size_t count, off64_t start) {
  return fails_at("write", file) ? -1 : REAL(pwrite64)(file, bytes, count, start);
}
