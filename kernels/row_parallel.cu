// What is behind a row-parallel product of one token whose partial sums the ranks have given one another (peers.cuh): their
// sum, the error compensator, the residual sum and the RMSNorm. Method: row_parallel.py.
//
//     z = sum of A x over ranks,    v = sum of W x over ranks + B (s_B gamma(z) z),    gamma as in compensated_gemv.cu
//     total = v + residual,    y = weight * total / sqrt(mean total^2 + eps)
//
// Compile-time constants (-D): OUTPUTS N; RANKS; STRIDE values of a rank's partial sums, N of outputs and then those of z;
// RANK, a multiple of 16 (0: no compensator); HIDDEN, of which the gate has RANK each (0: gamma is 1); BF16 0 1 (else
// float16); SPLITS thread blocks of a cluster, which share the outputs; THREADS of a block. Every block computes the gate.
//
// It is launched beside the product that gives this rank's partial sums, and reads what it can meanwhile.

#include "gate.cuh"
#include "peers.cuh"

constexpr u32 SHARE = (OUTPUTS + SPLITS - 1) / SPLITS, EACH = (SHARE + THREADS - 1) / THREADS; // outputs of a block, of a thread
constexpr u32 WARPS = THREADS / 32;
constexpr u32 WIDTH = HIDDEN * RANK;                  // of the gate's hidden layer
constexpr u32 GATE = 2 * WIDTH * RANK + WIDTH + RANK; // values of a gate: W1 [WIDTH, RANK], W2 [RANK, WIDTH], b1, b2
constexpr u32 PIECES = RANK ? RANK / 16 : 1;          // of 16 bytes in a row of B
constexpr u32 BLOCKS_AT = WARPS * 4, Z_AT = (BLOCKS_AT + SPLITS * 4 + 15) / 16 * 16; // shared memory: sums of warps, of
constexpr u32 HIDDEN_AT = Z_AT + RANK * 4, GATE_AT = HIDDEN_AT + WIDTH * 4;          // blocks, z, hidden layer, gate

extern "C" __global__ void __cluster_dims__(SPLITS) __launch_bounds__(THREADS)
row_parallel(u64 *partial, const char *__restrict__ up, const u16 *__restrict__ gate, const float *__restrict__ scales,
             const u16 *__restrict__ residual, const u16 *__restrict__ weight, u32 eps, u16 *__restrict__ y,
             u16 *__restrict__ total) {
    extern __shared__ __align__(128) char shared[];
    auto of_warps = (float *)shared, of_blocks = (float *)(shared + BLOCKS_AT);
    auto z = (float *)(shared + Z_AT), hidden = (float *)(shared + HIDDEN_AT);
    const u32 thread = threadIdx.x, block_rank = blockIdx.x % SPLITS, first = block_rank * SHARE;
    __shared__ __align__(8) u64 received;
    const u32 arrived = shared_address(&received);
    if (thread == 0) expect_bytes(arrived, SPLITS * 4);
    cluster_arrive();

    auto row_of = [&](u32 i) { return first + thread + i * THREADS; };
    auto has_row = [&](u32 i) { return thread + i * THREADS < SHARE && row_of(i) < OUTPUTS; };
    uint4 codes[EACH][PIECES];
    float before[EACH], factor[EACH];
    for (u32 i = thread; i < GATE / 8 * (HIDDEN > 0); i += THREADS)
        copy(shared_address(shared + GATE_AT) + i * 16, gate + i * 8, true, false);
    end_of_copies();
    UNROLL for (u32 i = 0; i < EACH; i++) {
        if (!has_row(i)) continue;
        if (RANK) UNROLL for (u32 p = 0; p < PIECES; p++) codes[i][p] = load_early(up + (u64)row_of(i) * RANK + p * 16);
        before[i] = to_float<BF16>(load_early_if<2>(residual + row_of(i), true));
        factor[i] = to_float<BF16>(load_early_if<2>(weight + row_of(i), true));
    }
    cluster_wait(); // every block has started
#if RANK
    if (thread < RANK) z[thread] = sum_of_ranks(partial, OUTPUTS + thread, STRIDE);
    wait_for_copies<0>();
    __syncthreads();
    scale_and_gate<RANK, WIDTH, THREADS>(shared + GATE_AT, scales + RANK, z, hidden, z, thread);
    __syncthreads();
#endif

    float sums[EACH], squares = 0;
    UNROLL for (u32 i = 0; i < EACH; i++) {
        if (!has_row(i)) continue;
        float value = sum_of_ranks(partial, row_of(i), STRIDE);
        clear_ranks(partial, row_of(i), STRIDE);
#if RANK
        float more[4] = {};
        UNROLL for (u32 k = 0; k < RANK; k++)
            more[k % 4] += z[k] * (float)(signed char)((&codes[i][k / 16].x)[k % 16 / 4] >> 8 * (k % 4));
        value += (more[0] + more[1]) + (more[2] + more[3]);
#endif
        value = to_float<BF16>(to_half<BF16>(value)) + before[i];
        sums[i] = to_float<BF16>(to_half<BF16>(value));
        squares += sums[i] * sums[i];
    }

    UNROLL for (int mask = 16; mask > 0; mask /= 2) squares += __shfl_xor_sync(~0u, squares, mask);
    if (thread % 32 == 0) of_warps[thread / 32] = squares;
    __syncthreads();
    if (thread < SPLITS) { // each sends the block's sum to one block, its own among them
        float sum = 0;
        UNROLL for (u32 w = 0; w < WARPS; w++) sum += of_warps[w];
        send(shared_address(of_blocks + block_rank), sum, arrived, thread);
    }
    // With them comes every block's word that it has read its sums and z, so that the whole product of this rank has been
    // given, and reads x no more: y and total may lie in memory that was freed behind its launch.
    wait_for_bytes(arrived);
    float all = 0;
    UNROLL for (u32 b = 0; b < SPLITS; b++) all += of_blocks[b];
    const float inverse = rsqrtf(all / OUTPUTS + __uint_as_float(eps));
    UNROLL for (u32 i = 0; i < EACH; i++) {
        if (!has_row(i)) continue;
        total[row_of(i)] = to_half<BF16>(sums[i]);
        y[row_of(i)] = to_half<BF16>(factor[i] * to_float<BF16>(to_half<BF16>(sums[i] * inverse)));
    }
#if RANK
    if (block_rank == 0 && thread < RANK) clear_ranks(partial, OUTPUTS + thread, STRIDE);
#endif
    wait_for_launch_before(); // so that what comes behind this launch waits for the product, too
}
