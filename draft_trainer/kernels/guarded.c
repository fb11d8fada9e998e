/* Beyond the end of a file that was cut short its mapped memory is SIGBUS, which ends the process.
 * The file's size can be looked at before, and the file can be cut between look and copy. Whoever
 * writes into the ring of shared memory could end the trainer that way. What is read by `guarded`
 * is given up instead, by a jump out of the signal's handler. */
#define _GNU_SOURCE
#include "guarded.h"

#include <setjmp.h>
#include <signal.h>
#include <string.h>

/* Not allocated when the handler first looks: that would be no place to do it. */
static __thread sigjmp_buf *volatile expected __attribute__((tls_model("initial-exec")));
static struct sigaction before;

static void on_fault(int number, siginfo_t *info, void *context) {
    (void)info, (void)context;
    if (expected) siglongjmp(*expected, 1);
    /* Not ours: it happens again, and whoever had the signal before gets it. */
    sigaction(number, &before, NULL);
}

/* To be called once in a process; 0 if that worked. */
int expect_faults(void) {
    struct sigaction ours;
    memset(&ours, 0, sizeof ours);
    ours.sa_sigaction = on_fault;
    /* The handler is left by a jump: the signal must not stay blocked. */
    ours.sa_flags = SA_SIGINFO | SA_NODEFER;
    sigemptyset(&ours.sa_mask);
    return sigaction(SIGBUS, &ours, &before);
}

int guarded(void (*read)(void *), void *what) {
    sigjmp_buf here;
    if (sigsetjmp(here, 0)) {
        expected = NULL;
        return 1;
    }
    expected = &here;
    read(what);
    expected = NULL;
    return 0;
}

typedef struct {
    uint8_t *to;
    const uint8_t *const *pieces;
    const int64_t *sizes;
    int64_t count;
} Gather;

static void gather(void *what) {
    const Gather *all = what;
    uint8_t *to = all->to;
    for (int64_t i = 0; i < all->count; i++) {
        memcpy(to, all->pieces[i], (size_t)all->sizes[i]);
        to += all->sizes[i];
    }
}

/* Copies pieces one after the other; as `guarded`. */
int guarded_copy(uint8_t *to, const uint8_t *const *pieces, const int64_t *sizes, int64_t count) {
    Gather all = {to, pieces, sizes, count};
    return guarded(gather, &all);
}
