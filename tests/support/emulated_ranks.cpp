// Ranks of one process, each a thread, add numbers over shared memory, with what scalar code makes of them as the measure.
//
//     emulated_ranks LIBRARY ISA
#include "operations.h"

#include <cstdio>
#include <cstdlib>
#include <dlfcn.h>
#include <fcntl.h>
#include <string>
#include <sys/mman.h>
#include <thread>
#include <unistd.h>
#include <vector>

using caesura::Collective;

namespace {

constexpr int RANKS = 3;
constexpr int64_t BUFFER = 1 << 18, SIZE = 300001;  // several rounds, and a last vector that is not whole

void* library;

template <class Function>
Function* find(const std::string& name) {
    void* found = dlsym(library, name.c_str());
    if (!found) fprintf(stderr, "%s\n", dlerror()), exit(1);
    return (Function*)found;
}

float as_float(float x) { return x; }
float as_float(bf16 x) { return to_float(x); }
float as_float(fp16 x) { return to_float(x); }

void narrow(float x, float& to) { to = x; }
void narrow(float x, fp16& to) {
    const __fp16 half = (__fp16)x;
    memcpy(&to, &half, sizeof half);
}
void narrow(float x, bf16& to) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    to.bits = (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

template <class E>
E number(int64_t i, int rank) {
    const uint32_t mixed = (uint32_t)(i * RANKS + rank) * 2654435761u;
    E x;
    narrow(((float)(mixed >> 8) - 0x1p23f) * 0x1p-20f, x);
    return x;
}

template <class E>
void run_rank(int rank, int memory_of_all, std::vector<E>& x) {
    const std::string path = "/proc/self/fd/" + std::to_string(memory_of_all);
    const int own = open(path.c_str(), O_RDWR);
    struct flock lock = {};
    lock.l_type = F_WRLCK, lock.l_whence = SEEK_SET, lock.l_start = rank, lock.l_len = 1;
    if (own < 0 || fcntl(own, F_OFD_SETLK, &lock)) perror("lock"), exit(1);
    const int64_t bytes = find<int64_t(int64_t, int64_t)>("caesura_collective_bytes")(RANKS, BUFFER);
    void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, own, 0);
    Collective c = {memory, rank, RANKS, BUFFER, 300000000000, own, 0, 0, 0, -1};
    find<void(Collective*)>("caesura_collective_assemble")(&c);
    const char* name = sizeof(E) == 4 ? "f32" : std::is_same_v<E, bf16> ? "bf16" : "f16";
    const auto reduce = find<void(Collective*, void*, int64_t, int64_t, int64_t, int)>(std::string("caesura_reduce_") + name);
    reduce(&c, x.data(), SIZE, 0, SIZE, 2);
    find<void(Collective*)>("caesura_barrier")(&c);
    if (c.failure) fprintf(stderr, "rank %d: failure %d\n", rank, c.failure), exit(1);
}

template <class E>
bool sums_are_right() {
    const int memory = memfd_create("ranks", 0);
    if (ftruncate(memory, find<int64_t(int64_t, int64_t)>("caesura_collective_bytes")(RANKS, BUFFER))) return false;
    std::vector<E> x[RANKS], sum(SIZE);
    for (int64_t i = 0; i < SIZE; i++) {
        float total = 0.0f;
        for (int rank = 0; rank < RANKS; rank++) {
            x[rank].push_back(number<E>(i, rank));
            total = rank ? total + as_float(x[rank][i]) : as_float(x[rank][i]);
        }
        narrow(total, sum[i]);
    }
    std::vector<std::thread> ranks;
    for (int rank = 0; rank < RANKS; rank++) ranks.emplace_back(run_rank<E>, rank, memory, std::ref(x[rank]));
    for (std::thread& each : ranks) each.join();
    for (const std::vector<E>& found : x)
        if (memcmp(found.data(), sum.data(), SIZE * sizeof(E))) return false;
    return true;
}

}  // namespace

int main(int, char** arguments) {
    library = dlopen(arguments[1], RTLD_NOW);
    if (!library) return fprintf(stderr, "%s\n", dlerror()), 1;
    const int isa = atoi(arguments[2]);
    if (find<int(int)>("caesura_use_isa")(isa) != isa) return fprintf(stderr, "no instruction set %d\n", isa), 1;
    const bool right[] = {sums_are_right<float>(), sums_are_right<bf16>(), sums_are_right<fp16>()};
    printf("float32 %d, bfloat16 %d, float16 %d\n", right[0], right[1], right[2]);
}
