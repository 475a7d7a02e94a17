// Frames in frame memory: closed, found and moved on the device. Compiled behind kernels.cu and parts.cu, with their
// parameters; `task` says what is expected of a frame and where it is.
//
// An area of frames without a fixed length begins with the head of a sized message: its bytes, and the same number
// with all bits turned round. Frames follow one another behind it. The first one of an area sets the head, the next
// ones move it on, so the kernels of one area's frames run one after another.

#define HEAD 16
#define HEADER 64
#define PAYLOAD 16  // where the header has the bytes behind it,
#define TOTAL 40    // the checksum of the directory
#define CRC 60      // and its own crc32
#define CRC_BITS 128

__device__ inline u64 word_at(const u8* place) { return *(const u64*)place; }
__device__ inline u32 directory_end(u32 tiles) { return aligned(HEADER + sizeof(Entry) * tiles, 16); }
__device__ inline u32 tiles_of(u64 count, u32 tile) { return (u32)((count + tile - 1) / tile); }
__device__ inline u64 cursor(const u8* area, u32 index) { return index ? word_at(area) : HEAD; }

__device__ void write_head(u8* area, u64* again, u64 used) {
    u64* head = (u64*)area;
    head[0] = again[0] = used;
    head[1] = again[1] = ~used;
}

// The crc32 of a header with these two words, for every thread. It is linear: `table` has what each bit changes.
__device__ u32 crc_of(const Task* task, const u32* table, u64 payload, u64 total) {
    u32 t = threadIdx.x;
    u64 word = t < CRC_BITS / 2 ? payload : total, mine = 0;
    if (t < CRC_BITS && word >> t % (CRC_BITS / 2) & 1) mine = table[t];
    __shared__ u32 parts[MOST_WARPS];
    for (u32 step = 16; step; step /= 2) mine ^= __shfl_xor_sync(EVERYONE, mine, step);
    if (t % 32 == 0) parts[t / 32] = (u32)mine;
    __syncthreads();
    u32 crc = *(const u32*)(task->header + CRC);
    for (u32 warp = 0; warp < WARPS; warp++) crc ^= parts[warp];
    __syncthreads();
    return crc;
}

__device__ u64 bytes_of(const Entry* entries, u32 tiles) {
    u64 sum = 0;
    for (u32 i = threadIdx.x; i < tiles; i += THREADS) sum += entries[i].bytes;
    return block_sum(sum);
}

// Whether a decoder can follow the entry of a tile of `here` values: `_check` of device.py.
__device__ bool sound_entry(const Entry& entry, u32 here, bool last, const Task* task) {
    if (entry.zero) return false;
    if (!task->width || entry.mode == RAW) {
        u32 bytes = task->width ? aligned(here * task->width, 16) : last ? task->last : task->most;
        return entry.mode == (task->width ? RAW : CODED) && entry.bytes == bytes && entry.kept == here && !entry.base
               && !entry.bits && !entry.sparse && !entry.exceptions;
    }
    if (entry.mode != CODED && entry.mode != ZERO_MAP) return false;
    if (entry.bits > MOST_BITS || entry.kept > here || (entry.mode == CODED && entry.kept != here)) return false;
    if (entry.sparse > padded(entry.kept) / 8 || entry.exceptions > entry.kept) return false;
    u32 at[SECTIONS];
    sections(at, task->width, here, entry);
    return aligned(at[END], 16) == entry.bytes;
}

// Move tiles from `values`, `stride` apart, to the frame that is next in the area `wire`; `entries` are not there yet.
KERNEL(place_tiles) {
    u64 before = 0;
    for (u32 i = threadIdx.x; i < blockIdx.x; i += THREADS) before += entries[i].bytes;
    before = block_sum(before);
    u32 bytes = entries[blockIdx.x].bytes;
    const u64* from = (const u64*)(values + blockIdx.x * stride);
    u64* to = (u64*)(wire + cursor(wire, task->index) + directory_end(tiles_of(count, tile)) + before);
    for (u32 i = threadIdx.x; i < bytes / 8; i += THREADS) to[i] = from[i];
}

// One block: write header and directory of a frame whose tiles are in the area `wire`. space: the table of crc_of.
KERNEL(seal_frame) {
    u32 t = threadIdx.x, tiles = tiles_of(count, tile), end = directory_end(tiles);
    u64 begin = task->head ? cursor(wire, task->index) : stride;
    u8* frame = wire + begin;
    u64* directory = (u64*)(frame + HEADER);
    if ((u64*)entries != directory)
        for (u32 i = t; i < 3 * tiles; i += THREADS) directory[i] = ((u64*)entries)[i];
    for (u32 i = 3 * tiles + t; i < (end - HEADER) / 8; i += THREADS) directory[i] = 0;
    __syncthreads();
    u64 payload = end - HEADER + bytes_of((const Entry*)directory, tiles);
    u64 total = checksum((const u8*)directory, end - HEADER);
    u32 crc = crc_of(task, (const u32*)space, payload, total);
    if (t < HEADER / 8) ((u64*)frame)[t] = word_at(task->header + 8 * t);
    __syncthreads();
    if (t) return;
    *(u64*)(frame + PAYLOAD) = payload;
    *(u64*)(frame + TOTAL) = total;
    *(u32*)(frame + CRC) = crc;
    task->begin = begin;
    if (task->head) write_head(wire, task->head, begin + HEADER + payload);
}

// One block: look at everything that says where things are in a frame of the area `wire`: the head of the area, the
// sizes of the frames before it, its header and its directory. stride: where the frame lies, if areas have no head.
KERNEL(find_frame) {
    u32 t = threadIdx.x, tiles = tiles_of(count, tile), end = directory_end(tiles);
    u64 begin = stride, room = task->room;
    bool sound = true;
    if (task->head) {
        u64 used = word_at(wire);
        begin = HEAD;
        sound = word_at(wire + 8) == ~used && used >= HEAD && used <= room;
        if (sound) room = used;
        for (u32 i = 0; sound && i < task->index; i++) {
            sound = begin + HEADER <= room;
            u64 bytes = sound ? word_at(wire + begin + PAYLOAD) : 0;
            sound = sound && bytes % 16 == 0 && bytes <= room - begin - HEADER;
            begin += HEADER + bytes;
        }
    }
    sound = sound && begin + end <= room;
    if (sound) {  // the same for all threads
        const u8* frame = wire + begin;
        const Entry* directory = (const Entry*)(frame + HEADER);
        u64 payload = word_at(frame + PAYLOAD), total = word_at(frame + TOTAL), wrong = 0;
        u32 crc = crc_of(task, (const u32*)space, payload, total);
        for (u32 i = t; i < HEADER; i += THREADS) {
            bool varies = (i >= PAYLOAD && i < PAYLOAD + 8) || (i >= TOTAL && i < TOTAL + 8) || i >= CRC;
            if (!varies && frame[i] != task->header[i]) wrong = 1;
        }
        if (*(const u32*)(frame + CRC) != crc || payload > room - begin - HEADER) wrong = 1;
        if (checksum((const u8*)directory, end - HEADER) != total) wrong = 1;
        if (bytes_of(directory, tiles) + end - HEADER != payload) wrong = 1;
        for (u32 i = t; i < tiles; i += THREADS) {
            u64 left = count - (u64)i * tile;
            if (!sound_entry(directory[i], left < tile ? (u32)left : tile, i + 1 == tiles, task)) wrong = 1;
        }
        sound = !block_max(wrong);
    }
    if (t) return;
    task->begin = begin;
    task->refused = !sound;
    if (!sound) *(volatile u32*)task->wrong = 1;
}

// Append a frame of the area `values`, which was found, to the area `wire`. stride: how many are there already.
KERNEL(append_frame) {
    if (task->refused) return;
    const u64* from = (const u64*)(values + task->begin);
    u64* to = (u64*)(wire + cursor(wire, (u32)stride));
    u64 words = (HEADER + word_at((const u8*)from + PAYLOAD)) / 8;
    for (u64 i = (u64)blockIdx.x * THREADS + threadIdx.x; i < words; i += (u64)tile * THREADS) to[i] = from[i];
}

// One block, after append_frame: say how long the area is now. space: its head in host memory.
KERNEL(extend_area) {
    if (threadIdx.x || task->refused) return;
    u64 payload = word_at(values + task->begin + PAYLOAD);
    write_head(wire, (u64*)space, cursor(wire, (u32)stride) + HEADER + payload);
}

// What coding took away from `count` values is owed: values - decoded (`entries`), where finite, is added to `wire`.
KERNEL(lose) {
    u32 here = values_of(count, tile, blockIdx.x);
    u64 first = (u64)blockIdx.x * tile;
    const float *from = (const float*)values + first, *decoded = (const float*)entries + first;
    float* owed = (float*)wire + first;
    for (u32 i = threadIdx.x; i < here; i += THREADS) {
        float gone = minus(from[i], decoded[i]);
        owed[i] = plus(owed[i], (bits_of(gone) & 0x7fffffff) < 0x7f800000 ? gone : 0.0f);
    }
}
