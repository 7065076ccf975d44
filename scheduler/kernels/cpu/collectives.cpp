// Sums, concatenations, exchanges and broadcasts of several processes of one host, over memory that they share.
//
// Invariants:
// - A collective is a number of rounds, numbered alike on all ranks. In each a rank writes to its place in the round's
//   buffer, says so, waits until all have said so, and reads. There are two buffers, taken in turn: who says that it has
//   written round n + 1 has read round n, so round n + 2 may overwrite it.
// - A sum goes through the ranks in their order, in float, and is rounded once.
// - No wait is endless. A process locks one byte of the memory's file, and the system drops the lock however the process
//   ends; a waiting rank checks it every LOOK. A rank that gives up tells all others.
// - Between two checks a waiting thread sleeps, after a short time of spinning: there may be more ranks than cores.
#ifndef CAESURA_ISA

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "operations.h"

#include <climits>
#include <fcntl.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

using namespace caesura;

namespace {

constexpr int64_t CHUNK = 1 << 14;     // bytes that one task copies or sums
constexpr int64_t PARALLEL = 1 << 17;  // bytes that are worth waking the other threads
constexpr int SPINS = 500;  // some 20 us
constexpr timespec LOOK = {0, 10000000};  // between two looks at the others

// One rank's line of the shared memory.
struct alignas(64) Line {
    uint32_t round;     // written up to this one
    uint32_t resets;    // stages of caesura_collective_reset() that it has reached
    uint32_t sleepers;  // threads of others that may sleep until one of these changes
    uint32_t left;
};

struct Shared {
    alignas(64) uint32_t aborted;
    Line ranks[MAX_RANKS];
};

constexpr int64_t HEADER = 8192;
static_assert(sizeof(Shared) <= HEADER, "the buffers begin behind it");

Shared& shared(const Collective& c) { return *(Shared*)c.memory; }

// The buffer that `rank` writes in `round`.
char* place(const Collective& c, uint32_t round, int64_t rank) {
    return (char*)c.memory + HEADER + ((round & 1) * c.size + rank) * c.bytes;
}

bool reached(const uint32_t& word, uint32_t wanted) { return (int32_t)(__atomic_load_n(&word, __ATOMIC_ACQUIRE) - wanted) >= 0; }

void wake(uint32_t* word) { syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0); }

void wake_all(const Collective& c) {
    for (int64_t rank = 0; rank < c.size; rank++) {
        wake(&shared(c).ranks[rank].round);
        wake(&shared(c).ranks[rank].resets);
    }
}

// Several threads of this rank may do so, a late one after others have gone on: the word never goes back.
void publish(const Collective& c, uint32_t Line::*word, uint32_t value) {
    Line& line = shared(c).ranks[c.rank];
    uint32_t old = __atomic_load_n(&(line.*word), __ATOMIC_RELAXED);
    while ((int32_t)(value - old) > 0) {
        if (!__atomic_compare_exchange_n(&(line.*word), &old, value, true, __ATOMIC_SEQ_CST, __ATOMIC_RELAXED)) continue;
        if (__atomic_load_n(&line.sleepers, __ATOMIC_SEQ_CST)) wake(&(line.*word));
        return;
    }
}

void fail(Collective& c, int failure, int64_t rank) {
    if (__atomic_load_n(&c.failure, __ATOMIC_RELAXED)) return;
    __atomic_store_n(&c.lost, (int32_t)rank, __ATOMIC_RELAXED);
    __atomic_store_n(&c.failure, failure, __ATOMIC_RELEASE);
    __atomic_store_n(&shared(c).aborted, 1, __ATOMIC_SEQ_CST);
    wake_all(c);
}

bool is_gone(const Collective& c, int64_t rank) {
    struct flock lock = {};
    lock.l_type = F_WRLCK, lock.l_whence = SEEK_SET, lock.l_start = rank, lock.l_len = 1;
    return fcntl(c.fd, F_OFD_GETLK, &lock) == 0 && lock.l_type == F_UNLCK;
}

int64_t now_ns() {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000000000ll + time.tv_nsec;
}

// Returns true if no rank has failed, so that this one may begin.
bool may_begin(Collective& c) {
    if (!c.failure && __atomic_load_n(&shared(c).aborted, __ATOMIC_ACQUIRE)) fail(c, ABORTED, -1);
    return !c.failure;
}

// Events that end a wait, beside the timeout and a rank that left: ABSENCE, a rank's process ended; ABORT, a rank gave up.
enum class Heeds { ALL, ABSENCE, ABORT };

// Waits until the word of every rank has reached `wanted`; returns false if it never will, with the reason in c.failure.
bool await(Collective& c, uint32_t Line::*word, uint32_t wanted, Heeds heeds) {
    int64_t deadline = 0;
    for (int64_t rank = 0; rank < c.size; rank++) {
        Line& line = shared(c).ranks[rank];
        for (int spins = 0; spins < SPINS && !reached(line.*word, wanted); spins++) relax();
        while (!reached(line.*word, wanted)) {
            if (!deadline) deadline = now_ns() + c.timeout_ns;
            const bool left = __atomic_load_n(&line.left, __ATOMIC_ACQUIRE), late = now_ns() > deadline;
            const bool aborted = heeds != Heeds::ABSENCE && __atomic_load_n(&shared(c).aborted, __ATOMIC_ACQUIRE);
            const bool gone = heeds != Heeds::ABORT && !left && !aborted && is_gone(c, rank);
            if (left || aborted || gone || late) {
                if (reached(line.*word, wanted)) break;  // its last act
                fail(c, left ? LEFT : aborted ? ABORTED : gone ? GONE : LATE, aborted ? -1 : rank);
                return false;
            }
            __atomic_fetch_add(&line.sleepers, 1, __ATOMIC_SEQ_CST);
            const uint32_t seen = __atomic_load_n(&(line.*word), __ATOMIC_SEQ_CST);
            if ((int32_t)(seen - wanted) < 0) syscall(SYS_futex, &(line.*word), FUTEX_WAIT, seen, &LOOK, nullptr, 0);
            __atomic_fetch_sub(&line.sleepers, 1, __ATOMIC_SEQ_CST);
        }
    }
    return true;
}

// Stages outside of a team: each by a team of its own, where there is enough to do.
struct Teams {
    int threads;
    bool worth_it;

    template <class Work>
    void each(int64_t tasks, const Work& work) const {
        run_team(threads, worth_it, [&](Team& team) { team.each(tasks, work); });
    }
};

// One round in two stages, `write` and `read` by tasks. After a failure the stages are passed, and nothing is done.
template <class Stages, class Write, class Read>
void one_round(Collective& c, uint32_t round, Stages& stages, int64_t writes, const Write& write, int64_t reads,
               const Read& read) {
    const bool failed = __atomic_load_n(&c.failure, __ATOMIC_RELAXED);
    stages.each(writes, [&](int64_t task, int64_t) { if (!failed) write(task); });
    if (!failed) publish(c, &Line::round, round);
    const bool there = !failed && await(c, &Line::round, round, Heeds::ALL);
    stages.each(reads, [&](int64_t task, int64_t) { if (there) read(task); });
}

int64_t chunks(int64_t bytes) { return (bytes + CHUNK - 1) / CHUNK; }

struct Gather {
    char* out;
    int64_t out_row, out_width, width;  // bytes
};

// Bytes [begin, end) of what `rank` has, row by row, to their columns; `from` is where they begin.
void spread(const Gather& a, int64_t rank, const char* from, int64_t begin, int64_t end) {
    while (begin < end) {
        const int64_t row = begin / a.width, column = begin % a.width;
        const int64_t count = smaller(a.width - column, end - begin), to = rank * a.width + column;
        const int64_t kept = smaller(count, a.out_width - to);
        if (kept > 0) std::memcpy(a.out + row * a.out_row + to, from, kept);
        begin += count, from += count;
    }
}

}  // namespace

#define CAESURA_FILE "collectives.cpp"
#include "each_isa.h"

namespace {

template <class E, class Stages>
void reduce(const Reduce& a, Stages& stages) {
    Collective& c = *a.collective;
    const int64_t bytes = a.size * sizeof(E), begin = a.begin * sizeof(E), end = smaller(a.end, a.size) * sizeof(E);
    uint32_t round = a.round;
    for (int64_t start = 0; start < bytes; start += c.bytes, round++) {
        const int64_t here = smaller(c.bytes, bytes - start);
        const int64_t first_sum = smaller(here, larger(begin - start, 0)), sums = larger(0, smaller(end - start, here) - first_sum);
        char *x = (char*)a.x + start, *mine = place(c, round, c.rank);
        const char* first = place(c, round, 0);
        one_round(
            c, round, stages, chunks(here),
            [&](int64_t task) { std::memcpy(mine + task * CHUNK, x + task * CHUNK, smaller(CHUNK, here - task * CHUNK)); },
            chunks(sums), [&](int64_t task) {
                const int64_t at = first_sum + task * CHUNK;
                const int64_t count = smaller(CHUNK, first_sum + sums - at) / sizeof(E);
                CAESURA_DISPATCH(sum(first + at, c.bytes, c.size, (E*)(x + at), count));
            });
    }
}

template <class E>
void reduce_alone(Collective& c, void* x, int64_t size, int64_t begin, int64_t end, int threads) {
    if (!may_begin(c)) return;
    Teams teams{threads, size * (int64_t)sizeof(E) > PARALLEL};
    reduce<E>(Reduce{&c, x, size, c.round + 1, begin, end}, teams);
    c.round += (uint32_t)rounds_of(&c, size * sizeof(E));
}

}  // namespace

int64_t caesura::rounds_of(const Collective* c, int64_t bytes) { return c ? (bytes + c->bytes - 1) / c->bytes : 0; }

// Bytes of shared memory, all zeros at first, that so many ranks need with buffers of `bytes` each.
CAESURA_API int64_t caesura_collective_bytes(int64_t size, int64_t bytes) { return HEADER + 2 * size * bytes; }
CAESURA_API int64_t caesura_collective_struct_bytes() { return sizeof(Collective); }

#define CAESURA_ALL_REDUCE(NAME, E)                                                                                    \
    void caesura::all_reduce(const Reduce& a, Team& team, E) { reduce<E>(a, team); }                                   \
    /* Elements [begin, end) of x[size] become the sum of all ranks'. */                                               \
    CAESURA_API void caesura_reduce_##NAME(Collective* c, void* x, int64_t size, int64_t begin, int64_t end,           \
                                           int threads) {                                                              \
        reduce_alone<E>(*c, x, size, begin, end, threads);                                                             \
    }
CAESURA_EACH_TYPE(CAESURA_ALL_REDUCE)

// Bytes [from[r], from[r] + counts[r]) of the x[bytes] of each rank r, one after the other in out. `longest`: of all ranks' x.
CAESURA_API void caesura_collect(Collective* collective, const void* x, int64_t bytes, int64_t longest, const int64_t* from,
                                 const int64_t* counts, void* out, int threads) {
    Collective& c = *collective;
    if (!may_begin(c)) return;
    int64_t to[MAX_RANKS + 1] = {};
    for (int64_t rank = 0; rank < c.size; rank++) to[rank + 1] = to[rank] + counts[rank];
    Teams teams{threads, bytes + to[c.size] > PARALLEL};
    for (int64_t start = 0; start < longest; start += c.bytes) {
        const int64_t here = larger(0, smaller(c.bytes, bytes - start)), pieces = chunks(smaller(c.bytes, longest - start));
        const uint32_t round = ++c.round;
        char* mine = place(c, round, c.rank);
        one_round(
            c, round, teams, chunks(here),
            [&](int64_t task) {
                std::memcpy(mine + task * CHUNK, (const char*)x + start + task * CHUNK, smaller(CHUNK, here - task * CHUNK));
            },
            pieces * c.size, [&](int64_t task) {
                const int64_t rank = task / pieces, at = start + task % pieces * CHUNK;
                const int64_t begin = larger(at, from[rank]), end = smaller(at + CHUNK, from[rank] + counts[rank]);
                if (begin < end)
                    std::memcpy((char*)out + to[rank] + begin - from[rank], place(c, round, rank) + begin - start, end - begin);
            });
    }
}

// x[rows, width] of each rank side by side in out[rows, out_width]; what lies further right is dropped. All in bytes.
CAESURA_API void caesura_all_gather(Collective* collective, const void* x, int64_t rows, int64_t width, void* out,
                                    int64_t out_row, int64_t out_width, int threads) {
    Collective& c = *collective;
    if (!may_begin(c)) return;
    const Gather a{(char*)out, out_row, out_width, width};
    const int64_t bytes = rows * width;
    Teams teams{threads, c.size * bytes > PARALLEL};
    for (int64_t start = 0; start < bytes; start += c.bytes) {
        const int64_t here = smaller(c.bytes, bytes - start), pieces = chunks(here);
        const uint32_t round = ++c.round;
        char* mine = place(c, round, c.rank);
        one_round(
            c, round, teams, pieces,
            [&](int64_t task) {
                std::memcpy(mine + task * CHUNK, (const char*)x + start + task * CHUNK, smaller(CHUNK, here - task * CHUNK));
            },
            pieces * c.size, [&](int64_t task) {
                const int64_t rank = task / pieces, at = task % pieces * CHUNK;
                spread(a, rank, place(c, round, rank) + at, start + at, start + smaller(at + CHUNK, here));
            });
    }
}

// x becomes that of rank `source`.
CAESURA_API void caesura_broadcast(Collective* collective, void* x, int64_t bytes, int64_t source, int threads) {
    Collective& c = *collective;
    if (!may_begin(c)) return;
    Teams teams{threads, bytes > PARALLEL};
    for (int64_t start = 0; start < bytes; start += c.bytes) {
        const int64_t here = smaller(c.bytes, bytes - start);
        const uint32_t round = ++c.round;
        char *buffer = place(c, round, source), *mine = (char*)x + start;
        const auto copy = [&](char* to, const char* from, int64_t task) {
            std::memcpy(to + task * CHUNK, from + task * CHUNK, smaller(CHUNK, here - task * CHUNK));
        };
        const bool sends = c.rank == source;
        one_round(
            c, round, teams, sends ? chunks(here) : 0, [&](int64_t task) { copy(buffer, mine, task); },
            sends ? 0 : chunks(here), [&](int64_t task) { copy(mine, buffer, task); });
    }
}

CAESURA_API void caesura_barrier(Collective* collective) {
    Collective& c = *collective;
    if (!may_begin(c)) return;
    publish(c, &Line::round, ++c.round);
    await(c, &Line::round, c.round, Heeds::ALL);
}

// This rank gives up: who waits for it is told. In any thread; a call of this rank that is under way ends, too.
CAESURA_API void caesura_collective_abort(Collective* c) {
    __atomic_store_n(&shared(*c).aborted, 1, __ATOMIC_SEQ_CST);
    wake_all(*c);
}

// Waits until all ranks are here for the first time. Until then a late rank looks the same as one that has ended.
CAESURA_API void caesura_collective_assemble(Collective* collective) {
    Collective& c = *collective;
    publish(c, &Line::resets, ++c.resets);
    await(c, &Line::resets, c.resets, Heeds::ABORT);
}

// All ranks call this to begin anew, none of them within a collective. In stages: all have stopped, then all numbers are
// back at zero, then they count again.
CAESURA_API void caesura_collective_reset(Collective* collective) {
    Collective& c = *collective;
    Line& mine = shared(c).ranks[c.rank];
    c.failure = OK, c.lost = -1;
    publish(c, &Line::resets, ++c.resets);
    if (!await(c, &Line::resets, c.resets, Heeds::ABSENCE)) return;
    __atomic_store_n(&mine.round, 0, __ATOMIC_SEQ_CST);
    c.round = 0;
    if (c.rank == 0) __atomic_store_n(&shared(c).aborted, 0, __ATOMIC_SEQ_CST);
    publish(c, &Line::resets, ++c.resets);
    await(c, &Line::resets, c.resets, Heeds::ABSENCE);
}

// This rank goes: nobody waits for it any more.
CAESURA_API void caesura_collective_leave(Collective* c) {
    __atomic_store_n(&shared(*c).ranks[c->rank].left, 1, __ATOMIC_SEQ_CST);
    wake_all(*c);
}

#else

namespace CAESURA_ISA {

template <class E>
static void sum(const char* first, int64_t stride, int64_t ranks, E* out, int64_t size) {
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) {
        F total = load((const E*)first + i);
        for (int64_t rank = 1; rank < ranks; rank++) total = add(total, load((const E*)(first + rank * stride) + i));
        store(out + i, total);
    }
    if (i < size) {
        F total = load((const E*)first + i, size - i);
        for (int64_t rank = 1; rank < ranks; rank++)
            total = add(total, load((const E*)(first + rank * stride) + i, size - i));
        store(out + i, total, size - i);
    }
}

}  // namespace CAESURA_ISA

#endif
