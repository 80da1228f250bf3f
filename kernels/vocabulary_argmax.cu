// The greedy choice among logits that are split over ranks by tokens. Method: vocabulary_argmax.py.
//
// `vocabulary_give` finds a rank's best token of every row and gives it to every rank as one word of 8 bytes, whose order as
// a signed integer is that of the logits and, of equal ones, the reverse of that of the tokens: its high half is the logit,
// its low half the complement of the token. `vocabulary_take` takes the largest of all ranks' words of a row.
//
// Compile-time constants (-D): RANKS, 1 for a word to memory of one's own, which a collective takes the largest of; THREADS
// of a block; BF16 0 1 (else float16). A word is never 0, so that a word in the memory is a mark as well.

#include "peers.cuh"

using i64 = long long;
constexpr u32 WARPS = THREADS / 32, NO_TOKEN = ~0u;
constexpr u32 BELOW_ALL = 0xFF800000, EXPONENT = 0x7F800000; // minus infinity; the bits of what is not finite
constexpr int NOT_A_NUMBER = 0x7FFFFFFF, MAGNITUDE = 0x7FFFFFFF;

INLINE i64 larger(i64 a, i64 b) { return a > b ? a : b; }

INLINE i64 word_of(float logit, u32 token) {
    const int bits = (int)__float_as_uint(logit + 0.f); // -0 is 0
    const int order = logit != logit ? NOT_A_NUMBER : bits ^ (bits >> 31 & MAGNITUDE);
    return (i64)((u64)(u32)order << 32 | (u32)~token);
}

// A thread block is of one row, of which this rank has the tokens from `first` on, `count` of `stride` logits.
extern "C" __global__ void __launch_bounds__(THREADS)
vocabulary_give(const u16 *__restrict__ logits, u32 stride, u32 count, u32 first, PEERS_TAKEN) {
    begin_next();
    u64 *const memory[4] = PEERS_GIVEN;
    const u32 thread = threadIdx.x, row = blockIdx.x;
    __shared__ i64 of_warps[WARPS];

    i64 best = word_of(__uint_as_float(BELOW_ALL), NO_TOKEN); // of a rank that has none of the tokens
    for (u32 at = thread * 8; at < count; at += THREADS * 8) {
        const uint4 eight = load_early(logits + (u64)row * stride + at);
        UNROLL for (u32 i = 0; i < 8; i++) {
            const float logit = to_float<BF16>((&eight.x)[i / 2] >> 16 * (i % 2) & 0xFFFF);
            if (at + i < count) best = larger(best, word_of(logit, first + at + i));
        }
    }

    UNROLL for (int mask = 16; mask > 0; mask /= 2) {
        const u32 low = __shfl_xor_sync(~0u, (u32)best, mask);
        const u32 high = __shfl_xor_sync(~0u, (u32)((u64)best >> 32), mask);
        best = larger(best, (i64)((u64)high << 32 | low));
    }
    if (thread % 32 == 0) of_warps[thread / 32] = best;
    __syncthreads();
    if (thread == 0) {
        UNROLL for (u32 w = 1; w < WARPS; w++) best = larger(best, of_warps[w]);
        UNROLL for (int rank = 0; rank < RANKS; rank++) store_system(memory[rank] + row, (u64)best);
    }
}

// One thread block with a thread for each row. `stride`: words from rank to rank. It is launched beside `vocabulary_give`.
extern "C" __global__ void __launch_bounds__(THREADS)
vocabulary_take(u64 *memory, u32 stride, u32 rows, i64 *__restrict__ tokens) {
    const u32 row = threadIdx.x;
    if (row < rows) {
        u64 words[RANKS];
        bool given;
        do {
            given = true;
            UNROLL for (int rank = 0; rank < RANKS; rank++) words[rank] = load_system(memory + rank * stride + row);
            UNROLL for (int rank = 0; rank < RANKS; rank++) given &= words[rank] != 0;
        } while (!given);
        i64 best = (i64)words[0];
        UNROLL for (int rank = 1; rank < RANKS; rank++) best = larger(best, (i64)words[rank]);
        if (RANKS > 1)
            UNROLL for (int rank = 0; rank < RANKS; rank++) store_system(memory + rank * stride + row, 0);
        const int order = (int)(best >> 32), bits = order ^ (order >> 31 & MAGNITUDE);
        const bool finite = (bits & EXPONENT) != EXPONENT;
        tokens[row] = finite ? (i64)(u32)~(u32)best : -1;
    }
    wait_for_launch_before(); // so that what comes behind this launch waits for the one before it, too
}
