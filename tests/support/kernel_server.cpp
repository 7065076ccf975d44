// Runs functions of a library in an emulator, in the memory of the process that asks for them.
//
//     kernel_server LIBRARY DESCRIPTOR        requests on stdin, answers on stdout; the descriptor is of its /proc/self/mem
//
// A page of that process is fetched to the same address when a function first touches it. When the function returns, bytes that
// it has changed are written back, and pages are dropped. All calls are made by one thread, one after the other.
#include <atomic>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>
#include <utility>

namespace {

constexpr uintptr_t PAGE = 4096;
constexpr size_t PAGES = 1 << 16, PLACES = 2 * PAGES;  // of one call, at most

struct Request {
    char name[64];
    int64_t words[32];
    float numbers[8];
};

int memory;
char before[PAGES][PAGE];
uintptr_t fetched[PAGES], places[PLACES];  // in the order in which they came, and by hash
size_t count = 0;
std::atomic_flag busy = ATOMIC_FLAG_INIT;

[[noreturn]] void give_up(const char* what, uintptr_t address) {
    fprintf(stderr, "%s at %#zx\n", what, (size_t)address);
    _exit(1);
}

// Notes that `page` has come; false if it had already.
bool note(uintptr_t page) {
    size_t place = page / PAGE % PLACES;
    for (; places[place]; place = (place + 1) % PLACES)
        if (places[place] == page) return false;
    if (count == PAGES) give_up("too many pages", page);
    places[place] = fetched[count++] = page;
    return true;
}

// Several threads may come for one page. It appears whole: another one would not fault on half of it.
void fetch(int, siginfo_t* info, void*) {
    const uintptr_t page = (uintptr_t)info->si_addr & ~(PAGE - 1);
    while (busy.test_and_set(std::memory_order_acquire)) {}
    if (note(page)) {
        char* copy = before[count - 1];
        if (pread(memory, copy, PAGE, (off_t)page) != (ssize_t)PAGE) give_up("no memory", (uintptr_t)info->si_addr);
        void* fresh = mmap(nullptr, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        memcpy(fresh, copy, PAGE);
        if (mremap(fresh, PAGE, PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, (void*)page) != (void*)page) give_up("no page", page);
    }
    busy.clear(std::memory_order_release);
}

void return_pages() {
    for (size_t i = 0; i < count; i++) {
        const char* now = (const char*)fetched[i];
        for (uintptr_t begin = 0, end; begin < PAGE; begin = end) {
            for (end = begin; end < PAGE && now[end] != before[i][end];) end++;
            if (end == begin) end++;
            else if (pwrite(memory, now + begin, end - begin, (off_t)(fetched[i] + begin)) != (ssize_t)(end - begin))
                give_up("no writable memory", fetched[i]);
        }
        munmap((void*)fetched[i], PAGE);
    }
    memset(places, 0, sizeof places);
    count = 0;
}

// Eight words and the floats are passed in registers, all other words in places of eight bytes on the stack: so it does not
// matter in which order the function takes words and floats, nor how many of them.
template <size_t... IN_REGISTERS, size_t... ON_STACK>
int64_t call(void* function, const Request& a, std::index_sequence<IN_REGISTERS...>, std::index_sequence<ON_STACK...>) {
    using Function = int64_t (*)(decltype((void)IN_REGISTERS, int64_t())..., decltype((void)IN_REGISTERS, float())...,
                                 decltype((void)ON_STACK, int64_t())...);
    return ((Function)function)(a.words[IN_REGISTERS]..., a.numbers[IN_REGISTERS]..., a.words[8 + ON_STACK]...);
}

}  // namespace

// For the library, too, instead of the C library's: QEMU 7.2 repeats the instruction that stands before a DC ZVA which faults.
extern "C" __attribute__((optimize("no-tree-loop-distribute-patterns"))) void* memset(void* to, int value, size_t size) {
    for (size_t i = 0; i < size; i++) ((char*)to)[i] = (char)value;
    return to;
}

int main(int, char** arguments) {
    void* library = dlopen(arguments[1], RTLD_NOW);
    if (!library) return fprintf(stderr, "%s\n", dlerror()), 1;
    memory = atoi(arguments[2]);
    struct sigaction action = {};
    action.sa_sigaction = fetch;
    action.sa_flags = SA_SIGINFO;
    sigaction(SIGSEGV, &action, nullptr);
    static Request request;
    while (fread(&request, sizeof request, 1, stdin) == 1) {
        void* function = dlsym(library, request.name);
        if (!function) return fprintf(stderr, "%s\n", dlerror()), 1;
        const int64_t result = call(function, request, std::make_index_sequence<8>(), std::make_index_sequence<24>());
        return_pages();
        fwrite(&result, sizeof result, 1, stdout);
        fflush(stdout);
    }
}
