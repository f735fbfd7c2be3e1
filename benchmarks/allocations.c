/* Bytes that a process's allocator has given out, aligned as PyTorch asks for the memory of its tensors.

   Loaded before the C library (LD_PRELOAD). PyTorch takes tensors on a processor by posix_memalign, and so do its kernels
   for what they need inside themselves. Counted are the bytes asked for, from the call until free, whoever holds them,
   those of 16 bytes and more. What other libraries ask for is not: oneDNN keeps the code there that it makes for products
   in bfloat16, a quarter of a megabyte for each shape. Nothing here knows of a tensor, a graph or a plan. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

extern void *__libc_memalign(size_t, size_t);
extern void __libc_free(void *);

#define SLOTS (1u << 21)
#define ALIGNED 64
#define LEAST 16 /* bytes; numbers that operators are given become tensors of 8 while they run */

static struct {
    void *at;
    size_t bytes;
} table[SLOTS];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static long long live, most;

static uint32_t home(const void *at) {
    return (uint32_t)(((uintptr_t)at >> 6) * 0x9E3779B97F4A7C15ull >> 40) & (SLOTS - 1);
}

static void note(void *at, size_t bytes) {
    pthread_mutex_lock(&lock);
    uint32_t i = home(at);
    while (table[i].at)
        i = (i + 1) & (SLOTS - 1);
    table[i].at = at;
    table[i].bytes = bytes;
    live += (long long)bytes;
    if (live > most)
        most = live;
    pthread_mutex_unlock(&lock);
}

static void forget(const void *at) {
    pthread_mutex_lock(&lock);
    uint32_t i = home(at);
    while (table[i].at && table[i].at != at)
        i = (i + 1) & (SLOTS - 1);
    if (table[i].at) {
        live -= (long long)table[i].bytes;
        /* Those behind it move up, so that no gap ends a search too early. */
        for (uint32_t j = (i + 1) & (SLOTS - 1); table[j].at; j = (j + 1) & (SLOTS - 1)) {
            uint32_t h = home(table[j].at);
            if (((j - h) & (SLOTS - 1)) >= ((j - i) & (SLOTS - 1))) {
                table[i] = table[j];
                i = j;
            }
        }
        table[i].at = NULL;
    }
    pthread_mutex_unlock(&lock);
}

/* Whether an address is in the library of PyTorch that has its allocators. */
static int of_allocator(const void *caller) {
    static _Thread_local struct { const void *caller; int is; } known[64];
    uint32_t at = (uint32_t)((uintptr_t)caller >> 2) & 63;
    if (known[at].caller != caller) {
        Dl_info info;
        known[at].is = dladdr(caller, &info) && info.dli_fname && strstr(info.dli_fname, "libc10");
        known[at].caller = caller;
    }
    return known[at].is;
}

int posix_memalign(void **given, size_t alignment, size_t bytes) {
    void *at = __libc_memalign(alignment, bytes);
    if (!at)
        return ENOMEM;
    if (alignment >= ALIGNED && bytes >= LEAST && of_allocator(__builtin_return_address(0)))
        note(at, bytes);
    *given = at;
    return 0;
}

void free(void *at) {
    if (at && ((uintptr_t)at & (ALIGNED - 1)) == 0)
        forget(at);
    __libc_free(at);
}

long long allocations_live(void) { return live; }

long long allocations_least(void) { return LEAST; }

long long allocations_most(void) { return most; }

void allocations_begin(void) {
    pthread_mutex_lock(&lock);
    most = live;
    pthread_mutex_unlock(&lock);
}
