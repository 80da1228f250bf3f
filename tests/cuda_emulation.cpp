// What kernels call that are compiled with cuda_emulation.h. A block is an operating-system thread, its CUDA threads are
// fibers that give way at warp and block barriers; a cluster's blocks run together. The first warp of a block that can go
// on does, in every second block the last, so that it is as far ahead of the others as it may be: what it takes from them
// too early, or writes over, shows.
// Copies land as late as they may: when the fiber waits for their group. Slow on purpose.
#undef _FORTIFY_SOURCE // whose longjmp takes another fiber's stack for a damaged one
#include "cuda_emulation.h"

#include <setjmp.h>
#include <ucontext.h>

#include <atomic>
#include <cfenv>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <thread>
#include <utility>
#include <vector>

__thread Index threadIdx, blockIdx, blockDim, gridDim;

namespace {

constexpr int STACK_BYTES = 1 << 16;
constexpr u32 MOST_POLLS = 1 << 16; // of a fiber that is not waiting for what nobody writes any more

struct Warp { // what the lanes of a warp show one another
    unsigned a[32][4], b[32][2];
    u32 value[32];
    int arrived = 0, turn = 0;
};
struct Copy { unsigned to; const void *from; bool zero; int bytes = 16; };
struct Product { bool brain; int columns; bool first; float (*d)[4]; const unsigned *a; unsigned b; };
struct Fiber {
    ucontext_t beginning;
    jmp_buf now; // swapcontext would ask the kernel for signals twice a turn
    std::unique_ptr<char[]> stack{new char[STACK_BYTES]};
    bool begun = false;
    bool done = false;
    int cluster_barriers = 0;
    u32 polls = 0; // loads of what other GPUs write, since a wait ended
    std::deque<std::vector<Copy>> groups{1}; // the last one is still open
    std::deque<std::vector<Product>> products{1}; // as well
};
struct Signal {
    u32 count = 0, arrived = 0, turn = 0;
    int64_t bytes = 0;         // that the phase waits for
    std::vector<Copy> copies;  // bulk copies that have not landed
    void end_phase() { if (arrived == count && bytes == 0) arrived = 0, turn++; }
};
struct Block {
    std::vector<std::unique_ptr<Fiber>> fibers;
    std::vector<Warp> warps;
    jmp_buf scheduler;
    int running = 0, alive = 0;
    u64 progress = 0;     // fibers that began or ended, and waits that ended
    bool arrived = false; // whether a fiber has just arrived at a signal, for which a warp before its own may wait
    struct { int arrived = 0, turn = 0; } barriers[16];
    std::map<u32, Signal> signals; // by their addresses
    const Launch *launch;
    char *shared;
};
constexpr u64 ENDED = ~0ull; // of passes, when no fiber is left
struct Arrivals { int64_t expected = 0, received = 0; };
struct Member { // a block, as the others of its cluster see it
    char *base = nullptr;
    std::atomic<u64> passes{0}; // over all of its fibers
    std::mutex lock;
    std::map<u32, Arrivals> arrivals; // by the address of the counter
    std::vector<std::function<void()>> posts; // what others do to its signals, when it waits for one
    template <class F> bool with(u32 counter, F f) {
        std::lock_guard<std::mutex> guard(lock);
        return f(arrivals[counter]);
    }
};
struct Cluster {
    std::atomic<int> started{0}, arrived{0};
    std::atomic<u64> progress{0};   // fibers that began and waits that ended
    std::atomic<bool> stuck{false}; // every fiber waits
    int threads = 0;
    std::vector<Member> members;
    std::vector<u64> passes() const {
        std::vector<u64> all;
        for (const Member &member : members) all.push_back(member.passes);
        return all;
    }
};
// Whether all blocks of a cluster wait for ever, by what one of them sees after each pass over its fibers. Since `since`
// nothing has begun or ended. Once every block has ended a pass, no fiber is on its way from one wait to the next any
// more; and what is true then is met by each fiber within three more passes.
struct Standstill {
    u64 progress = 0;
    bool all_wait = false;
    std::vector<u64> since;
    bool is_for_ever(const Cluster &all) {
        const std::vector<u64> passes = all.passes();
        if (since.empty() || all.progress != progress) {
            progress = all.progress, since = passes, all_wait = false;
            return false;
        }
        for (size_t i = 0; i < passes.size(); i++)
            if (passes[i] != ENDED && passes[i] < since[i] + (all_wait ? 3 : 1)) return false;
        if (all_wait) return all.progress == progress;
        all_wait = true, since = passes;
        return false;
    }
};
struct Tensor { const char *from, *to; };

std::vector<Tensor> tensors;
std::atomic<int> outside{0}; // reads of something else, writes of shared memory behind what was asked for or of mbarriers
std::atomic<int> unread{0};  // bulk copies that a block leaves in flight
bool boxes_land_early = false;
__thread Block *block;
__thread Cluster *cluster;
__thread u32 rank_here;

Fiber &fiber_here() { return *block->fibers[threadIdx.x]; }
Warp &warp_of() { return block->warps[threadIdx.x / 32]; }
template <class T> T &at_shared_of_block(unsigned p) { return *(T *)(block->shared + (int)p); }

void give_way() {
    Fiber &fiber = *block->fibers[block->running];
    if (_setjmp(fiber.now) == 0) _longjmp(block->scheduler, 1);
    threadIdx.x = block->running;
}
template <class F> void wait_until(F is_there) {
    if (is_there()) return;
    do give_way();
    while (!is_there());
    fiber_here().polls = 0;
    cluster->progress++, block->progress++;
}
void meet(int &arrived, int &turn, int parties) {
    int mine = turn;
    if (++arrived == parties) arrived = 0, turn++;
    wait_until([&] { return turn != mine; });
}
void land(const Copy &c) {
    if (!c.zero) check_read(c.from, c.bytes);
    c.zero ? memset(block->shared + c.to, 0, c.bytes) : memcpy(block->shared + c.to, c.from, c.bytes);
}

} // namespace

void check_read(const void *p, int bytes) {
    for (const Tensor &t : tensors)
        if ((const char *)p >= t.from && (const char *)p + bytes <= t.to) return;
    outside++;
}

// ---- warps and blocks

void __syncwarp() { meet(warp_of().arrived, warp_of().turn, 32); }
void __syncthreads() { barrier(0, block->fibers.size()); }
void barrier(u32 which, u32 threads) {
    meet(block->barriers[which].arrived, block->barriers[which].turn, threads);
}
static u32 exchange(u32 v, int from) {
    Warp &w = warp_of();
    w.value[threadIdx.x % 32] = v;
    __syncwarp();
    u32 got = w.value[from];
    __syncwarp();
    return got;
}
u32 __shfl_xor_sync(unsigned, u32 v, int mask) { return exchange(v, (threadIdx.x % 32) ^ mask); }
float __shfl_xor_sync(unsigned, float v, int mask) { return as_float(__shfl_xor_sync(0, as_bits(v), mask)); }
u32 __shfl_sync(unsigned, u32 v, int from, int width) {
    return exchange(v, threadIdx.x % 32 / width * width + from % width);
}
float __shfl_sync(unsigned, float v, int from, int width) { return as_float(__shfl_sync(0, as_bits(v), from, width)); }
u32 __reduce_max_sync(unsigned, u32 v) {
    Warp &w = warp_of();
    w.value[threadIdx.x % 32] = v;
    __syncwarp();
    u32 got = *std::max_element(w.value, w.value + 32);
    __syncwarp();
    return got;
}
u32 __reduce_add_sync(unsigned, u32 v) {
    Warp &w = warp_of();
    w.value[threadIdx.x % 32] = v;
    __syncwarp();
    u32 got = std::accumulate(w.value, w.value + 32, 0u);
    __syncwarp();
    return got;
}
u32 __ballot_sync(unsigned, bool v) { return __reduce_add_sync(0, u32(v) << threadIdx.x % 32); }

// ---- conversions and arithmetic

unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
    uint64_t bytes = (uint64_t)b << 32 | a;
    unsigned r = 0;
    for (int i = 0; i < 4; i++) r |= unsigned(bytes >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
    return r;
}
float __fadd_rd(float a, float b) { // rounded down
    volatile float p = a, q = b;
    fesetround(FE_DOWNWARD);
    volatile float sum = p + q;
    fesetround(FE_TONEAREST);
    return sum;
}
float __fmaf_ru(float a, float b, float c) { // exact in double for factors of a few bits
    double exact = (double)a * b + c;
    float rounded = (float)exact;
    return (double)rounded < exact ? std::nextafter(rounded, INFINITY) : rounded;
}
float half_to_float(u32 half) {
    u32 sign = half >> 15 & 1, exponent = half >> 10 & 31, mantissa = half & 1023;
    float v = exponent == 0    ? mantissa * 0x1p-24f
              : exponent == 31 ? (mantissa ? NAN : INFINITY)
                               : as_float(exponent + 127 - 15 << 23 | mantissa << 13);
    return sign ? -v : v;
}
template <int BRAIN> u16 to_half(double v) { // rounded once, to nearest, ties to even
    double m = std::fabs(v);
    u16 sign = std::signbit(v) << 15;
    const int digits = BRAIN ? 8 : 11, least = BRAIN ? -125 : -13, most = BRAIN ? 128 : 16;
    const u16 infinity = BRAIN ? 0x7F80 : 0x7C00;
    if (m != m) return infinity | 1;
    if (m == 0) return sign;
    int e;
    std::frexp(m, &e);
    e = max(e, least);
    double n = std::nearbyint(std::ldexp(m, digits - e)); // 2^(digits-1) ... 2^digits, less where subnormal
    if (std::isinf(m) || std::ldexp(n, e - digits) >= std::ldexp(1.0, most)) return sign | infinity;
    return sign | (u16)((u32)n + ((u32)(e - least) << (digits - 1)));
}
template <int BRAIN> u32 multiply_add(u32 a, u32 b, u32 c) {
    auto one = [](u32 p, u32 q, u32 r) { return (double)to_float<BRAIN>(p) * to_float<BRAIN>(q) + to_float<BRAIN>(r); };
    return to_halves<BRAIN>(one(a & 0xFFFF, b & 0xFFFF, c & 0xFFFF), one(a >> 16, b >> 16, c >> 16));
}
float most(float a, float b) { return std::isnan(a) ? a : std::isnan(b) ? b : std::fmax(a, b); }
template <int BRAIN, class F> static u32 of_halves(u32 a, u32 b, F f) { // f of two floats gives 16 bits
    u16 low = f(to_float<BRAIN>(a & 0xFFFF), to_float<BRAIN>(b & 0xFFFF));
    u16 high = f(to_float<BRAIN>(a >> 16), to_float<BRAIN>(b >> 16));
    return low | (u32)high << 16;
}
template <int BRAIN> u32 least(u32 a, u32 b) {
    return of_halves<BRAIN>(a, b, [](float p, float q) { return to_half<BRAIN>(fminf(p, q)); });
}
template <int BRAIN> u32 most(u32 a, u32 b) {
    return of_halves<BRAIN>(a, b, [](float p, float q) { return to_half<BRAIN>(most(p, q)); });
}
template <int BRAIN> u32 at_least(u32 a, u32 b) {
    return of_halves<BRAIN>(a, b, [](float p, float q) { return u16(p >= q ? 0xFFFF : 0); });
}
template <int BRAIN> u32 half_above(float v) {
    u16 h = to_half<BRAIN>(v);
    for (float f = to_float<BRAIN>(h); f < v; f = to_float<BRAIN>(h)) h = h == 0x8000 ? 1 : h >> 15 ? h - 1 : h + 1;
    return h;
}
u32 from_e4m3(u32 two) { // exponent and mantissa as those of a small float16
    auto one = [](u32 byte) { return std::ldexp(half_to_float((byte & 0x7F) << 7), 8); };
    return to_halves<0>(one(two), one(two >> 8));
}

// ---- shared memory and copies to it

void store_matrices(unsigned p, uint4 v) {
    Warp &w = warp_of();
    int lane = threadIdx.x % 32;
    w.value[lane] = p;
    __syncwarp();
    for (int i = 0; i < 4; i++) at_shared_of_block<u32>(w.value[8 * i + lane / 4] + lane % 4 * 4) = (&v.x)[i];
    __syncwarp();
}
void copy_bytes(unsigned to, const void *from, bool zero, int bytes) {
    fiber_here().groups.back().push_back({to, from, zero, bytes});
}
void end_of_copies() { fiber_here().groups.emplace_back(); }
void wait_until_copied(int pending) {
    auto &groups = fiber_here().groups;
    for (; (int)groups.size() - 1 > pending; groups.pop_front())
        for (const Copy &c : groups.front()) land(c);
}

static void post(u32 rank, std::function<void()> what) {
    Member &there = cluster->members[rank];
    std::lock_guard<std::mutex> guard(there.lock);
    there.posts.push_back(std::move(what));
}
static constexpr u64 MBARRIER = 0x5AFE5AFE5AFE5AFE; // in shared memory where one lies: nothing else may be written there
static Signal &signal_at(u32 p) {
    if (at_shared_of_block<u64>(p) != MBARRIER) outside++;
    return block->signals[p];
}
static void count_arrival(u32 p) {
    Signal &s = signal_at(p);
    s.arrived++, s.end_phase();
}
static void take_posts() {
    std::vector<std::function<void()>> posts;
    {
        std::lock_guard<std::mutex> guard(cluster->members[rank_here].lock);
        posts.swap(cluster->members[rank_here].posts);
    }
    for (auto &what : posts) what();
}
void signal_init(u32 p, u32 count) {
    block->signals[p] = {count};
    at_shared_of_block<u64>(p) = MBARRIER;
}
void signal_arrive(u32 p) {
    count_arrival(p);
    block->arrived = true;
    give_way();
}
void signal_arrive(u32 p, u32 rank) { post(rank, [=] { count_arrival(p); }); }
void signal_expect(u32 p, u32 bytes) {
    block->signals[p].bytes += bytes;
    count_arrival(p);
}
static bool land_all(Signal &s) { // whether there were any
    for (const Copy &c : s.copies) land(c), s.bytes -= c.bytes;
    bool landed = s.copies.size();
    s.copies.clear();
    if (landed) s.end_phase();
    return landed;
}
void signal_wait(u32 p, u32 turn) { // lands bulk copies, as late as they may
    Signal &s = signal_at(p);
    wait_until([&] {
        do take_posts();
        while ((s.turn - 1 - turn) % 2 && land_all(s));
        return (s.turn - 1 - turn) % 2 == 0;
    });
}
void copy_bulk(u32 to, const void *from, u32 bytes, u32 p, u64) {
    if (to % 16 || (u64)from % 16 || bytes % 16) std::abort();
    block->signals[p].copies.push_back({to, from, false, (int)bytes});
}
void copy_box(u32 to, const TensorMap *map, u32 column, u32 row, u32 p, u32 blocks) {
    if (to % 1024 || map->address % 16 || map->columns % 8) std::abort();
    std::vector<Copy> copies; // pieces of 16 bytes
    for (u32 r = 0; r < map->box; r++)
        for (u32 piece = 0; piece < 8; piece++) {
            const u32 at = column + piece * 8;
            const bool none = row + r >= map->rows || at >= map->columns;
            const char *from = (const char *)map->address + ((row + r) * map->columns + at) * 2;
            copies.push_back({to + r * 128 + (piece ^ r % 8) * 16, from, none});
        }
    for (u32 rank = 0; blocks >> rank; rank++)
        if (blocks >> rank & 1) post(rank, [=] {
            Signal &there = block->signals[p];
            there.copies.insert(there.copies.end(), copies.begin(), copies.end());
            if (boxes_land_early) land_all(there);
        });
}
void copy_box(u32 to, const TensorMap *map, u32 column, u32 row, u32 p) {
    copy_box(to, map, column, row, p, 1u << rank_here);
}

// ---- matrix products

template <int BRAIN> void mma(float c[4], const unsigned a[4], unsigned b0, unsigned b1) {
    Warp &w = warp_of();
    int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    for (int i = 0; i < 4; i++) w.a[lane][i] = a[i];
    w.b[lane][0] = b0, w.b[lane][1] = b1;
    __syncwarp();
    for (int i = 0; i < 4; i++) {
        int row = g + (i / 2) * 8, column = 2 * t + i % 2;
        double sum = c[i];
        for (int k = 0; k < 16; k++) { // register and half that hold column k of A, row k of B
            unsigned ra = w.a[row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2], rb = w.b[column * 4 + k % 8 / 2][k / 8];
            sum += (double)to_float<BRAIN>(ra >> 16 * (k % 2)) * to_float<BRAIN>(rb >> 16 * (k % 2));
        }
        c[i] = (float)sum;
    }
    __syncwarp();
}
void mma_int8(int c[4], u32 a0, u32 a2, u32 b0, u32 b1) {
    Warp &w = warp_of();
    int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    w.a[lane][0] = a0, w.a[lane][1] = a2, w.b[lane][0] = b0, w.b[lane][1] = b1;
    __syncwarp();
    for (int i = 0; i < 2; i++)
        for (int k = 0; k < 32; k++) { // register and byte that hold column k of A, row k of B
            u32 ra = w.a[g * 4 + k % 16 / 4][k / 16], rb = w.b[(2 * t + i) * 4 + k % 16 / 4][k / 16];
            c[i] += int8_t(ra >> 8 * (k % 4)) * int8_t(rb >> 8 * (k % 4));
        }
    __syncwarp();
}
void count_common(int c[4], const u32 a[4], u32 b0, u32 b1) {
    Warp &w = warp_of();
    int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    for (int i = 0; i < 4; i++) w.a[lane][i] = a[i];
    w.b[lane][0] = b0, w.b[lane][1] = b1;
    __syncwarp();
    for (int i = 0; i < 4; i++)
        for (int word = 0; word < 8; word++) { // of 32 columns of A, rows of B
            u32 of_a = w.a[g * 4 + word % 4][i / 2 + word / 4 * 2], of_b = w.b[(2 * t + i % 2) * 4 + word % 4][word / 4];
            c[i] += __builtin_popcount(of_a & of_b);
        }
    __syncwarp();
}
void count_common(int c[4], u32 a0, u32 a1, u32 b) {
    const u32 a[4] = {a0, a1, 0, 0};
    count_common(c, a, b, 0);
}
u32 transpose(u32 pair) {
    Warp &w = warp_of();
    int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    w.value[lane] = pair;
    __syncwarp();
    auto at = [&](int row) { return w.value[row * 4 + g / 2] >> 16 * (g % 2) & 0xFFFF; };
    u32 got = at(2 * t) | at(2 * t + 1) << 16;
    __syncwarp();
    return got;
}
// As late as it may be, when the fiber waits for the group: until then it reads `a` and shared memory.
void multiply_later(bool brain, int columns, bool first, float (*d)[4], const unsigned a[4], unsigned b) {
    fiber_here().products.back().push_back({brain, columns, first, d, a, b});
}
static void multiply_now(const Product &p) {
    auto element = [&](int row, int k) { // of B
        unsigned at = p.b * 16 + row * 128 + k * 2;
        return at_shared_of_block<u32>(at ^ (at >> 7 & 7) << 4);
    };
    int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    for (int n = 0; n < p.columns / 8; n++) {
        if (p.first) std::fill(p.d[n], p.d[n] + 4, 0.0f);
        (p.brain ? mma<1> : mma<0>)(p.d[n], p.a, element(n * 8 + g, 2 * t), element(n * 8 + g, 2 * t + 8));
    }
}
void wgmma_end() { fiber_here().products.emplace_back(); }
void wait_until_multiplied(int pending) {
    auto &groups = fiber_here().products;
    for (; (int)groups.size() - 1 > pending; groups.pop_front())
        for (const Product &product : groups.front()) multiply_now(product);
    __syncwarp(); // `.sync`: no lane goes on before every lane of its warp has waited
}

// Of float16 and of bfloat16.
#define FOR_BOTH(BRAIN)                                                              \
    template u16 to_half<BRAIN>(double);                                             \
    template u32 multiply_add<BRAIN>(u32, u32, u32);                                 \
    template u32 least<BRAIN>(u32, u32);                                             \
    template u32 most<BRAIN>(u32, u32);                                              \
    template u32 at_least<BRAIN>(u32, u32);                                          \
    template u32 half_above<BRAIN>(float);                                           \
    template void mma<BRAIN>(float[4], const unsigned[4], unsigned, unsigned);
FOR_BOTH(0)
FOR_BOTH(1)

// ---- clusters

void cluster_arrive() { cluster->arrived++; }
void cluster_wait() { // for the barrier's next end: threads of a cluster arrive once for each
    int ends = ++fiber_here().cluster_barriers;
    wait_until([=] { return cluster->arrived >= cluster->threads * ends; });
}
void expect_bytes(u32 counter, u32 bytes) {
    cluster->members[rank_here].with(counter, [=](Arrivals &a) { return a.expected = bytes; });
}
void send_bytes(u32 to, const void *from, int bytes, u32 counter, u32 rank) {
    Member &there = cluster->members[rank];
    memcpy(there.base + (int)to, from, bytes);
    there.with(counter, [=](Arrivals &a) { return a.received += bytes; });
}
void wait_for_bytes(u32 counter) {
    auto all = [](Arrivals &a) { return a.received >= a.expected; };
    wait_until([=] { return cluster->members[rank_here].with(counter, all); });
}

u64 load_system(const u64 *p) {
    check_read(p, 8);
    if (++fiber_here().polls > MOST_POLLS) give_way();
    return __atomic_load_n(p, __ATOMIC_RELAXED);
}

// ---- launch

static void fiber_entry() {
    cluster->progress++, block->progress++;
    block->launch->kernel(block->launch->at);
    block->fibers[block->running]->done = true;
    block->alive--, block->progress++;
    _longjmp(block->scheduler, 1);
}
// Until the fiber gives way or ends.
static __attribute__((noinline)) void run_on(Block &mine, Fiber &fiber) {
    if (_setjmp(mine.scheduler) != 0) return;
    if (fiber.begun) _longjmp(fiber.now, 1);
    fiber.begun = true;
    setcontext(&fiber.beginning);
}
// Runs a warp until all of its fibers wait or one has arrived at a signal; whether any of them went on.
static bool run_warp(Block &mine, u32 warp) {
    const u64 before = mine.progress;
    u64 last;
    do {
        last = mine.progress;
        for (u32 i = 32 * warp; i < min(32 * (warp + 1), (u32)mine.fibers.size()); i++) {
            if (mine.fibers[i]->done) continue;
            mine.running = threadIdx.x = i;
            run_on(mine, *mine.fibers[i]);
            if (std::exchange(mine.arrived, false)) return true;
        }
    } while (mine.progress != last);
    return mine.progress != before;
}
static bool run_first_that_can_go_on(Block &mine) {
    const u32 warps = mine.warps.size();
    for (u32 i = 0; i < warps; i++)
        if (run_warp(mine, blockIdx.x % 2 ? warps - 1 - i : i)) return true;
    return false;
}
static void run_block(const Launch &launch, u32 index, u32 rank, Cluster *of) {
    Block mine;
    block = &mine, cluster = of, rank_here = rank;
    blockIdx.x = index, gridDim.x = launch.grid, blockDim.x = launch.threads;
    mine.launch = &launch, mine.shared = launch.shared();
    mine.warps.resize((launch.threads + 31) / 32), mine.alive = launch.threads;
    memset(mine.shared, 0xFF, SHARED_BYTES); // NaN
    for (unsigned i = 0; i < launch.threads; i++) {
        mine.fibers.push_back(std::make_unique<Fiber>());
        Fiber &fiber = *mine.fibers.back();
        getcontext(&fiber.beginning);
        fiber.beginning.uc_stack.ss_sp = fiber.stack.get(), fiber.beginning.uc_stack.ss_size = STACK_BYTES;
        fiber.beginning.uc_link = nullptr;
        makecontext(&fiber.beginning, fiber_entry, 0);
    }
    of->members[rank].base = mine.shared;
    for (of->started++; of->started < (int)of->members.size();) std::this_thread::yield();
    Standstill standstill;
    while (mine.alive && !of->stuck) {
        if (run_first_that_can_go_on(mine)) continue;
        of->members[rank].passes++;
        if (standstill.is_for_ever(*of)) of->stuck = true;
        std::this_thread::yield();
    }
    of->members[rank].passes = ENDED;
    take_posts();
    for (const auto &[p, signal] : mine.signals) unread += signal.copies.size();
    int written = 0; // of what no block asked for
    for (u32 i = launch.shared_bytes; i < SHARED_BYTES; i++) written += mine.shared[i] != '\xFF';
    outside += written;
}
int run(const Launch &launch, u32 count, void **starts, const u64 *sizes) {
    tensors.clear(), outside = 0, unread = 0;
    boxes_land_early = launch.boxes_land_early;
    for (u32 i = 0; i < count; i++) tensors.push_back({(const char *)starts[i], (const char *)starts[i] + sizes[i]});
    // From the last cluster to the first: what one writes behind its own part stays, where the next would write over it.
    for (u32 first = launch.grid / launch.cluster * launch.cluster; first >= launch.cluster;) {
        first -= launch.cluster;
        Cluster together;
        together.threads = launch.threads * launch.cluster;
        together.members = std::vector<Member>(launch.cluster);
        std::vector<std::thread> blocks;
        for (u32 i = 0; i < launch.cluster; i++)
            blocks.emplace_back(run_block, std::cref(launch), first + i, i, &together);
        for (auto &b : blocks) b.join();
        if (together.stuck) return NEVER_ENDS;
    }
    return outside ? outside.load() : -unread;
}
