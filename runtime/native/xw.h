/* What the plain loops of `xw` (xw.c) and those for AVX2 (xw_vectors.c) share. */
#ifndef TACCL_XW_H
#define TACCL_XW_H

#include "codecs.h"

#include <stdint.h>

/* Of a coded tile. */
enum section { ZEROS, LOW16, LOW, SIGNS, DENSE, MAP, SPARSE, POSITIONS, TOPS, SECTIONS };

enum { VECTOR_ROOM = 128 };     /* the least values for which there are loops for AVX2 */

/* In the caller's scratch, 8 TILE bytes. found has room for 3 bytes more than a plane has. */
struct work {
    _Alignas(8) uint8_t words[4 * TILE];
    uint8_t top[TILE];
    uint8_t plane[TILE / 8], map[TILE / 64], found[TILE / 8 + 8];
    uint16_t positions[TILE];
};

/* The bits of a top byte that are set only outside the window. */
static inline uint8_t beyond_window(int bits)
{
    return (uint8_t)(0x7F & -(2 << bits));
}

#ifdef TACCL_VECTORS
/* Where taccl_vectors(). room: of words, a multiple of 64 from VECTOR_ROOM on.
 *
 * Cuts words into the low bytes, signs and dense planes of a tile and work->plane; gives how many are outside the
 * window, with work->positions, and their work->top. */
int64_t taccl_xw_split(const void *words, int64_t width, int64_t room, const struct entry *e, uint8_t *wire,
                       const int64_t *starts, struct work *work);

/* The bytes of a plane whose bits are turned round that are not 0, with a map of them; how many there are. bytes: a
 * multiple of 16. */
int64_t taccl_xw_squeeze(const uint8_t *plane, int64_t bytes, uint8_t *map, uint8_t *found);

/* The way back, as far as 16 bytes of what was found are left for as many of the plane; how many bytes of it are
 * there. found: gets where the next is. */
int64_t taccl_xw_expand(const uint8_t *map, int64_t bytes, const uint8_t **found, const uint8_t *last,
                        uint8_t *plane);

/* Words, as if none were outside the window. */
void taccl_xw_join(const uint8_t *wire, const int64_t *starts, const struct entry *e, int64_t width, int64_t room,
                   const uint8_t *plane, void *words);
#endif

#endif
