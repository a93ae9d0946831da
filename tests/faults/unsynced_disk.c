/* A disk for one directory, preloaded: $SHADOW holds what its files held at their last sync.
   $SHADOW/fail lets one sync fail, after which the disk does not have what was written;
   $SHADOW/full lets every write fail. Names are durable with their file, as with ext4. */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <unistd.h>

static int in_disk(int fd, char *path) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t size = readlink(link, path, 4095);
    const char *disk = getenv("DISK");
    if (size < 0 || !disk) return 0;
    path[size] = 0;
    return strncmp(path, disk, strlen(disk)) == 0 && (path[strlen(disk)] == '/' || !path[strlen(disk)]);
}

static int flag(const char *name, int take) {
    char path[4096];
    snprintf(path, sizeof path, "%s/%s", getenv("SHADOW"), name);
    return take ? unlink(path) == 0 : access(path, F_OK) == 0;
}

static int synced_names(const char *path) { /* what was removed is gone now */
    char here[8300], there[8300];
    DIR *shadow = opendir(getenv("SHADOW"));
    struct dirent *entry;
    while (shadow && (entry = readdir(shadow))) {
        snprintf(here, sizeof here, "%s/%s", path, entry->d_name);
        snprintf(there, sizeof there, "%s/%s", getenv("SHADOW"), entry->d_name);
        if (strncmp(entry->d_name, "f", 1) && access(here, F_OK)) unlink(there);
    }
    if (shadow) closedir(shadow);
    return 0;
}

static int synced(int fd) {
    char path[4096], copy[8300], temporary[8310];
    struct stat found;
    if (!in_disk(fd, path)) return 0;
    if (fstat(fd, &found)) return 0;
    if (S_ISDIR(found.st_mode)) return synced_names(path);
    if (!S_ISREG(found.st_mode)) return 0;
    if (flag("fail", 1)) { errno = EIO; return -1; }
    snprintf(copy, sizeof copy, "%s/%s", getenv("SHADOW"), strrchr(path, '/') + 1);
    snprintf(temporary, sizeof temporary, "%s.copying", copy);
    int from = open(path, O_RDONLY), to = open(temporary, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    off_t at = 0;
    while (from >= 0 && sendfile(to, from, &at, 1 << 30) > 0) {}
    close(from);
    close(to);
    return rename(temporary, copy);
}

int fsync(int fd) { return synced(fd); }
int fdatasync(int fd) { return synced(fd); }

int rename(const char *from, const char *to) {
    static int (*real)(const char *, const char *);
    if (!real) real = dlsym(RTLD_NEXT, "rename");
    int result = real(from, to);
    const char *disk = getenv("DISK"), *shadow = getenv("SHADOW");
    if (!result && disk && !strncmp(from, disk, strlen(disk))) {
        char a[4096], b[4096];
        snprintf(a, sizeof a, "%s/%s", shadow, strrchr(from, '/') + 1);
        snprintf(b, sizeof b, "%s/%s", shadow, strrchr(to, '/') + 1);
        real(a, b);
    }
    return result;
}

static int is_full(int fd) {
    char path[4096];
    return flag("full", 0) && in_disk(fd, path);
}

ssize_t pwrite64(int fd, const void *data, size_t size, off64_t at) {
    static ssize_t (*real)(int, const void *, size_t, off64_t);
    if (!real) real = dlsym(RTLD_NEXT, "pwrite64");
    if (is_full(fd)) { errno = ENOSPC; return -1; }
    return real(fd, data, size, at);
}

ssize_t pwrite(int fd, const void *data, size_t size, off_t at) { return pwrite64(fd, data, size, at); }
