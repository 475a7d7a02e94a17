/* Copies for the executor: what memcpy does, and two things that it does not. See copy.c. */
#ifndef TACCL_COPY_H
#define TACCL_COPY_H

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

/* Shorter copies go through the caches whatever is asked for: past them they would only take longer. */
enum { STREAMED = 8 * 1024 };

/* stream: past the caches. */
void taccl_copy(void *to, const void *from, size_t bytes, int stream);

/* From another process's memory; stream: through a buffer, and from there past the caches. 0, or an errno, or -1 where the
 * kernel has read a part only. */
int taccl_read(pid_t process, void *to, uintptr_t from, size_t bytes, int stream);

#endif
