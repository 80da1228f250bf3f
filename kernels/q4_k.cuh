// Q4_K (q4_k_planes.py) as operands of tensor core products: what the sources of its layouts share.
//
// A warp reads 16 super-blocks at a time into shared memory: 16 lines of 128 bytes of codes, then their 16 headers. The
// 16-byte pieces of a line lie in an order that its readers choose, so that they read from different banks.
//
// Codes are masked where they are and read as float16 subnormals: q * 2^-24 from bits 0 to 3, q * 2^-20 from bits 4 to
// 7. The code of low nibbles keeps its high one, q + 16 q', and the product with q' is subtracted from its sum, which
// saves an instruction. Scales and minima act in float32, or as float16 with a power of two that keeps them in range.
#ifndef Q4_K_CUH
#define Q4_K_CUH

#include "halves.cuh"

constexpr u32 LINES = 16, LINE = 128, HEADER = 16;
constexpr u32 HEADERS_AT = LINES * LINE, BATCH = HEADERS_AT + LINES * HEADER; // in shared memory
constexpr float UNITS = 1 << 24;                                              // of low nibbles; a 16th for high ones

// Which bits of a header's three words belong to a lane's sub-blocks: 0 to 3, or 4 to 7.
struct Bits {
    u32 down, own, rest;
    INLINE Bits(bool last) : down(last ? 2 : 0), own(last ? 0x30303030 : 0x3F3F3F3F), rest(last ? 0x0F0F0F0F : 0) {}
    INLINE u32 scales(uint4 header) const { return header.y >> down & own | header.w & rest; } // four bytes
    INLINE u32 minima(uint4 header) const { return header.z >> down & own | header.w >> 4 & rest; }
};
constexpr u32 EXPONENT = 0x4B000000; // of 2^23, where the lowest bit is 1
INLINE float byte_to_float(u32 bytes, u32 which, u32 exponent = EXPONENT) { // a kept one saves registers for `which`
    return __uint_as_float(__byte_perm(bytes, exponent, 0x7440 | which)) - (1 << 23);
}

#if CLUSTER > 1
// Sums of N rows over the thread blocks of a cluster, in the order of the blocks, each of which adds up a share of them.
// It lies in shared memory.
template <u32 N> struct Joined {
    static constexpr u32 SHARE = (N + CLUSTER - 1) / CLUSTER;
    float received[CLUSTER][SHARE];
    u64 arrived;

    INLINE u32 rows(u32 part) const { return min(SHARE, N - min(N, part * SHARE)); } // that block `part` adds up
    INLINE void begin(u32 part) { // by all threads
        if (threadIdx.x == 0) expect_bytes(shared_address(&arrived), CLUSTER * rows(part) * 4);
        cluster_arrive();
    }
    // sum_of(row): the block's own sum; write(row, sum): takes that of all blocks. All threads of the block call it.
    template <class S, class W> INLINE void end(u32 part, u32 threads, S sum_of, W write) {
        cluster_wait(); // all blocks have started
        for (u32 row = threadIdx.x; row < N; row += threads)
            send(shared_address(&received[part][row % SHARE]), sum_of(row), shared_address(&arrived), row / SHARE);
        for (u32 i = threadIdx.x; i < rows(part); i += threads) {
            wait_for_bytes(shared_address(&arrived));
            float sum = 0;
            UNROLL for (int block = 0; block < CLUSTER; block++) sum += received[block][i];
            write(part * SHARE + i, sum);
        }
    }
};
#endif

// Sums of N rows over some programs, in their order; each adds up a share of the rows, which the others post to it. `boxes`
// are those of all: 32-bit words, 0 where there is no sum, as before and after a launch; a sum of 0 is posted as -0. As
// they wait for one another, all programs have to be on the device. `received` is shared memory for PROGRAMS shares, where
// sum_of(row), the program's own sum, may read; write(row, sum) takes that of all. All threads of the program call it.
template <u32 COUNT, u32 N> constexpr u32 POSTS = (N + COUNT - 1) / COUNT * COUNT * COUNT; // words of all boxes
template <u32 COUNT, u32 N, class S, class W>
INLINE void post(u32 *boxes, u32 part, u32 threads, float *received, S sum_of, W write) {
    constexpr u32 SHARE = (N + COUNT - 1) / COUNT, BOX = COUNT * SHARE;
    for (u32 row = threadIdx.x; row < N; row += threads) {
        const u32 bits = __float_as_uint(sum_of(row));
        *(volatile u32 *)(boxes + row / SHARE * BOX + part * SHARE + row % SHARE) = bits ? bits : 1u << 31;
    }
    __syncthreads();
    const u32 first = part * SHARE;
    for (u32 i = threadIdx.x; i < BOX; i += threads)
        if (first + i % SHARE < N) {
            volatile u32 *place = boxes + part * BOX + i;
            u32 bits = 0;
            while (bits == 0) bits = *place;
            *place = 0;
            received[i] = __uint_as_float(bits);
        }
    __syncthreads();
    for (u32 i = threadIdx.x; i < SHARE && first + i < N; i += threads) {
        float sum = 0;
        UNROLL for (u32 from = 0; from < COUNT; from++) sum += received[from * SHARE + i];
        write(first + i, sum);
    }
}

INLINE u32 high_nibbles(u32 v) { return v & 0x00F000F0; } // of the lower bytes
INLINE u32 word_of(uint4 v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

#endif
