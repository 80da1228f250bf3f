// y[m, n] = s_x[m] * s_w[n] * sum_k x_q[m, k] w_q[n, k], x quantized to int8 in the same launch. See w8a8_gemv.py.
//
// Compiled once per configuration; the launcher defines:
//   BF16     1 for bf16 activations, 0 for fp16      TOKENS   1..8, rows of x
//   WARPS    warps per thread block                  SEGMENT  columns of a piece of work, 256, 512, ...; it has 8 rows
//   STAGES   pieces in flight for each warp          PARTS    8-column parts of a token that one thread quantizes
//   CLUSTER  thread blocks that share weight rows and split their columns (more than 1 needs compute capability 9.0)
//
// Every warp prefetches its pieces STAGES ahead, so that weights stream from the start, while all warps together
// quantize the block's slice of the tokens. Weights are operand B of mma.m16n8k32, tokens operand A (8 of its 16 rows
// are used). A lane owns 16 consecutive bytes of one weight row: two k-steps of the mma, provided that both operands
// assign the 16 columns to lanes in the same order. So neither weights nor activations need to be rearranged.
#include "ptx.cuh"

constexpr int THREADS = 32 * WARPS;
constexpr int PITCH = SEGMENT + 64; // 64 past a multiple of 128: 16-byte reads of two rows have no bank conflict
constexpr int STAGE = 8 * PITCH;

// Two activations to two codes in bytes 0 and 1. Adding 1.5 * 2^23 rounds half to even and leaves the code in the low
// byte.
INLINE u32 quantize(u32 pair, float inverse) {
    const u32 low = __float_as_uint(__fmaf_rn(to_float<BF16>(pair & 0xFFFF), inverse, 12582912.0f));
    const u32 high = __float_as_uint(__fmaf_rn(to_float<BF16>(pair >> 16), inverse, 12582912.0f));
    return __byte_perm(low, high, 0x0040);
}
INLINE u32 largest_half(uint4 v) { // non-negative floats compare like their bits
    const u32 pair = __vmaxu2(__vmaxu2(v.x & 0x7FFF7FFF, v.y & 0x7FFF7FFF), __vmaxu2(v.z & 0x7FFF7FFF, v.w & 0x7FFF7FFF));
    return max(pair & 0xFFFF, pair >> 16);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
#if CLUSTER > 1
__cluster_dims__(CLUSTER, 1, 1)
#endif
w8a8_gemv(const u16 *__restrict__ x, const signed char *__restrict__ w, const float *__restrict__ s_w,
          u16 *__restrict__ y, int N, int K, int slice, int most_rows) { // slice % 128 == 0, most_rows % 8 == 0
    extern __shared__ __align__(128) char shared[];
    __shared__ u64 arrived[2];
    __shared__ u32 maxima[WARPS][8], slice_maxima[CLUSTER][8]; // of tokens
    __shared__ float s_x[8];
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32, row = lane / 4, part = lane % 4;

    // Groups of 8 weight rows are assigned to clusters round-robin, so that all clusters read nearby memory. A thread
    // block takes a slice of the columns of its cluster's rows, and stores the sums of some of the rows.
    const int rank = blockIdx.x % CLUSTER, cluster_id = blockIdx.x / CLUSTER, clusters = gridDim.x / CLUSTER;
    const int rows = ((N + 7) / 8 - cluster_id + clusters - 1) / clusters * 8;
    auto channel = [&](int r) { return (r / 8 * clusters + cluster_id) * 8 + r % 8; }; // of the cluster's row r
    const int k0 = rank * slice, columns = max(0, min(slice, K - k0)), code_pitch = slice + 64;
    const int segments = max(1, (columns + SEGMENT - 1) / SEGMENT), pieces = columns ? rows / 8 * segments : 0;
    const int share = most_rows / CLUSTER, mine = max(0, min(share, rows - rank * share));

    char *codes = shared + WARPS * STAGES * STAGE;        // [TOKENS][code_pitch]
    int *sums = (int *)(codes + TOKENS * code_pitch);     // [TOKENS][most_rows], of this slice
    float *scales = (float *)(sums + TOKENS * most_rows); // [share]
    int *received = (int *)(scales + share);              // [CLUSTER][TOKENS][share], in a cluster

    uint4 token[TOKENS][PARTS];
    UNROLL for (int m = 0; m < TOKENS; m++) UNROLL for (int i = 0; i < PARTS; i++) {
        const int k = (i * THREADS + thread) * 8;
        token[m][i] = {0, 0, 0, 0};
        if (k < columns) token[m][i] = load_early(x + (long long)m * K + k0 + k);
    }
    __syncwarp(); // otherwise the compiler loads the weights first and delays the tokens by 1 us or more
#pragma unroll 1
    for (int r = thread; r < mine; r += THREADS) // a wait for the tokens would include plain loads
        copy_few<4>(shared_address(scales + r), s_w + min(channel(rank * share + r), N - 1), true, false);

    const u64 once = evict_first();
    const u32 ring = shared_address(shared) + warp * STAGES * STAGE;
    auto fetch = [&](int piece, int stage) { // commits a group of copies, possibly empty
        const int r = piece / segments * 8, k = piece % segments * SEGMENT;
        const signed char *from = w + (long long)channel(r) * K + k0 + k;
        UNROLL for (int i = 0; i < SEGMENT / 64; i++) {
            const int down = (32 * i + lane) / (SEGMENT / 16), at = (32 * i + lane) % (SEGMENT / 16) * 16;
            const bool there = piece < pieces && channel(r) + down < N && k + at < columns;
            copy_once(ring + stage * STAGE + down * PITCH + at, from + (long long)down * K + at, once, there, false);
        }
        end_of_copies();
    };
    fetch(warp, 0);

#if CLUSTER > 1
    if (thread == 0) {
        expect_bytes(shared_address(&arrived[0]), TOKENS * CLUSTER * 4);
        expect_bytes(shared_address(&arrived[1]), TOKENS * CLUSTER * 4 * mine);
    }
    __syncwarp();
    cluster_arrive();
#endif
#pragma unroll 1
    for (int i = thread; i < TOKENS * most_rows; i += THREADS) sums[i] = 0;

    // The tokens' codes. The largest activation of a token may be in another slice.
    UNROLL for (int m = 0; m < TOKENS; m++) {
        u32 largest = 0;
        UNROLL for (int i = 0; i < PARTS; i++) largest = max(largest, largest_half(token[m][i]));
        largest = __reduce_max_sync(~0u, largest);
        if (lane == 0) maxima[warp][m] = largest;
    }
    UNROLL for (int stage = 1; stage < STAGES; stage++) fetch(warp + stage * WARPS, stage); // the tokens have arrived
    __syncthreads();
    u32 largest = 0; // of token `lane`
    if (lane < TOKENS)
        UNROLL for (int i = 0; i < WARPS; i++) largest = max(largest, maxima[i][lane]);
#if CLUSTER > 1
    cluster_wait();
    if (warp < CLUSTER && lane < TOKENS)
        send(shared_address(&slice_maxima[rank][lane]), __uint_as_float(largest), shared_address(&arrived[0]), warp);
    wait_for_bytes(shared_address(&arrived[0]));
    if (lane < TOKENS)
        UNROLL for (int i = 0; i < CLUSTER; i++) largest = max(largest, slice_maxima[i][lane]);
#endif
    const float absmax = to_float<BF16>(largest), quotient = absmax > 1e-30f ? __fdiv_rn(127.0f, absmax) : 0;
    const float infinity = __uint_as_float(0x7F800000), nan = __uint_as_float(0x7FFFFFFF);
    if (thread < TOKENS) s_x[thread] = absmax < infinity ? __fdiv_rn(absmax, 127.0f) : nan;
    UNROLL for (int m = 0; m < TOKENS; m++) {
        const float inverse = __shfl_sync(~0u, quotient, m, 32);
        UNROLL for (int i = 0; i < PARTS; i++) {
            const int k = (i * THREADS + thread) * 8;
            const uint4 t = token[m][i];
            const uint2 q = {__byte_perm(quantize(t.x, inverse), quantize(t.y, inverse), 0x5410),
                             __byte_perm(quantize(t.z, inverse), quantize(t.w, inverse), 0x5410)};
            if (k < slice) *(uint2 *)(codes + m * code_pitch + k) = q;
        }
    }
    __syncthreads();

    const u32 weight_at = ring + row * PITCH + 16 * part;
    const u32 code_at = shared_address(codes) + row * code_pitch + 16 * part;
    int stage = 0;
    for (int piece = warp; piece < pieces; piece += WARPS) {
        const int r = piece / segments * 8, k = piece % segments * SEGMENT, end = min(SEGMENT, columns - k);
        int sum[4][4] = {}; // four independent accumulators
        wait_for_copies<STAGES - 1>();
        __syncwarp();
#pragma unroll 4
        for (int at = 0; at < end; at += 128) // codes beyond the end are zero
            UNROLL for (int half = 0; half < 2; half++) {
                const uint4 b = load16(weight_at + stage * STAGE + at + 64 * half);
                uint4 a = {0, 0, 0, 0};
                load16_if(a, code_at + k + at + 64 * half, row < TOKENS);
                mma_int8(sum[2 * half], a.x, a.y, b.x, b.y);
                mma_int8(sum[2 * half + 1], a.z, a.w, b.z, b.w);
            }
        __syncwarp(); // all lanes have read the stage
        fetch(piece + STAGES * WARPS, stage);
        int *to = sums + row * most_rows + r + 2 * part; // integers: the order does not matter
        UNROLL for (int i = 0; i < 2; i++)
            if (row < TOKENS) atomicAdd(to + i, sum[0][i] + sum[1][i] + sum[2][i] + sum[3][i]);
        if (++stage == STAGES) stage = 0;
    }
    wait_for_copies<0>();
    __syncthreads();

#if CLUSTER > 1
#pragma unroll 1
    for (int i = thread; i < TOKENS * rows; i += THREADS) {
        const int m = i / rows, r = i % rows;
        const u32 to = shared_address(received + (rank * TOKENS + m) * share + r % share);
        send(to, __uint_as_float(sums[m * most_rows + r]), shared_address(&arrived[1]), r / share);
    }
    wait_for_bytes(shared_address(&arrived[1]));
#endif
    for (int r = thread; r < mine; r += THREADS) {
        const int n = channel(rank * share + r);
        if (n >= N) break;
        UNROLL for (int m = 0; m < TOKENS; m++) {
            int sum = 0;
#if CLUSTER > 1
            UNROLL for (int i = 0; i < CLUSTER; i++) sum += received[(i * TOKENS + m) * share + r];
#else
            sum = sums[m * most_rows + r];
#endif
            y[(long long)m * N + n] = to_half<BF16>((float)sum * s_x[m] * scales[r]);
        }
    }
}
