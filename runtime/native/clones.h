/* Loops that the compiler makes twice, with and without AVX2; the processor decides when the library is loaded. */
#ifndef TACCL_CLONES_H
#define TACCL_CLONES_H

#include <stdint.h>

/* GCC alone, and only a C library that can decide it (ifunc). */
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && defined(__GLIBC__)
#define CLONES __attribute__((target_clones("avx2", "default")))
#else
#define CLONES
#endif

#endif
