/* Reads memory of a file that somebody else may cut short meanwhile. */
#include <stdint.h>

/* Calls read(what). 1 where that met SIGBUS, and then what it wrote is not to be relied on; or 0. */
int guarded(void (*read)(void *), void *what);
