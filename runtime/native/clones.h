/* Loops that the compiler makes twice, with and without AVX2; the processor decides when the library is loaded. */
#ifndef TACCL_CLONES_H
#define TACCL_CLONES_H

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define CLONES __attribute__((target_clones("avx2", "default")))
#else
#define CLONES
#endif

#endif
