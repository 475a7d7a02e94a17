/* What tiles of all codecs share. */
#ifndef TACCL_CODECS_H
#define TACCL_CODECS_H

#include "clones.h"

#include <stdint.h>

/* The next multiple of `to`, a power of two. */
static inline int64_t aligned(int64_t bytes, int64_t to)
{
    return (bytes + to - 1) & -to;
}

#endif
