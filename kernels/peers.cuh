// Where the partial sums of a row-parallel product go (row_parallel.py). RANKS 1: as float32 to memory of one's own, which
// a collective adds up. RANKS 2 to 4: to the memory of every rank, one's own too, each value with a mark in 8 bytes; what
// reads a value waits for its mark, so that neither a fence nor a counter is needed, and takes the mark away.
#ifndef PEERS_CUH
#define PEERS_CUH

#include "ptx.cuh"

constexpr u64 MARK = 1ull << 32; // above the 32 bits of a value

#define PEERS_TAKEN u64 *peer0, u64 *peer1, u64 *peer2, u64 *peer3 // parameters of a kernel; beyond RANKS they are unused
#define PEERS_GIVEN {peer0, peer1, peer2, peer3}

struct Peers {
    u64 *memory[4];

    INLINE void give(u32 at, float value) const {
        if (RANKS == 1) ((float *)memory[0])[at] = value;
        else UNROLL for (int rank = 0; rank < RANKS; rank++) store_system(memory[rank] + at, MARK | __float_as_uint(value));
    }
};

// The sum of a value over all ranks, in their order, so that every rank has the same one. `stride`: from rank to rank.
INLINE float sum_of_ranks(const u64 *from, u32 at, u32 stride) {
    if (RANKS == 1) return __ldcg((const float *)from + at);
    u64 values[RANKS];
    bool marked;
    do {
        marked = true;
        UNROLL for (int rank = 0; rank < RANKS; rank++) values[rank] = load_system(from + rank * stride + at);
        UNROLL for (int rank = 0; rank < RANKS; rank++) marked &= values[rank] >> 32 != 0;
    } while (!marked);
    float sum = 0;
    UNROLL for (int rank = 0; rank < RANKS; rank++) sum += __uint_as_float((u32)values[rank]);
    return sum;
}

// Takes the marks of a value away, for the next product that uses this memory.
INLINE void clear_ranks(u64 *from, u32 at, u32 stride) {
    if (RANKS > 1)
        UNROLL for (int rank = 0; rank < RANKS; rank++) store_system(from + rank * stride + at, 0);
}

#endif
