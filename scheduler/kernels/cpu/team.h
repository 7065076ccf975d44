// Threads that go through stages of tasks together: an operation is a stage, or several.
//
// Invariants:
// - Every thread of a team passes the same stages in the same order. A thread takes its own share of a stage from its
//   beginning, so that neighbouring tasks are one thread's as long as all are equally fast, and then helps the others with
//   theirs.
// - A stage ends when its tasks are done, by any thread: no thread waits for one that has no task. A thread that other processes
//   have displaced holds up its current task, not the team (docs/contributing/experiments.md has what that gains).
// - So a thread may come to a stage when the others are stages ahead. How many tasks a stage has must follow from what no later
//   stage overwrites; what a task reads and writes may be overwritten, as a stage that has ended has none left.
#pragma once

#include "common.h"

#include <omp.h>
#include <time.h>

namespace caesura {

constexpr int MAX_TEAM = 128;

struct alignas(64) Counter {
    int64_t value;
};

class Team {
   public:
    // Counters that a stage needs; they start at zero.
    static int64_t counters(int threads) { return threads + 1; }

    // `stages`: counters of all stages that will be passed, the same for all threads.
    Team(int thread, int size, Counter* stages) : thread(thread), size(size), stage(stages) {}

    const int thread, size;

    // A stage: work(task, next) for each of `tasks`; `next` is what this thread does afterwards, or -1.
    template <class Work>
    void each(int64_t tasks, const Work& work) {
        int64_t mine = 0;
        Share share(*this, tasks);
        int64_t task = share.take();
        while (task >= 0) {
            const int64_t next = share.take();
            work(task, next);
            mine++;
            task = next;
        }
        Counter& done = stage[size];
        __atomic_fetch_add(&done.value, mine, __ATOMIC_RELEASE);
        wait(done, tasks);
        stage += counters(size);
    }

   private:
    // Tasks of a stage that this thread takes: its own share, then what is left of the next threads'.
    class Share {
       public:
        Share(const Team& team, int64_t tasks) : team(team), tasks(tasks) { turn_to(team.thread); }

        // -1: none is left.
        int64_t take() {
            while (helped < team.size) {
                if (__atomic_load_n(&taken->value, __ATOMIC_RELAXED) < end - first) {
                    const int64_t task = first + __atomic_fetch_add(&taken->value, 1, __ATOMIC_RELAXED);
                    if (task < end) return task;
                }
                if (++helped < team.size) turn_to((team.thread + helped) % team.size);
            }
            return -1;
        }

       private:
        void turn_to(int owner) {
            first = tasks * owner / team.size, end = tasks * (owner + 1) / team.size;
            taken = &team.stage[owner];
        }

        const Team& team;
        const int64_t tasks;
        int64_t first, end;
        Counter* taken;
        int helped = 0;
    };

    // Others are at their last tasks. Where that takes long they may not be running: asleep, this thread leaves them its core.
    static void wait(const Counter& done, int64_t tasks) {
        constexpr int SPINS = 4000;
        constexpr timespec NAP = {0, 20000};
        for (int spins = 0; __atomic_load_n(&done.value, __ATOMIC_ACQUIRE) < tasks; spins++) {
            if (spins < SPINS) {
                relax();
            } else {
                nanosleep(&NAP, nullptr);
            }
        }
    }

    Counter* stage;
};

// An operation of at most two stages: work(team) by `threads`, or, where that is not worth it, by the caller alone.
template <class Work>
void run_team(int threads, bool worth_it, const Work& work) {
    if (threads > MAX_TEAM) threads = MAX_TEAM;
    if (threads < 2 || !worth_it) threads = 1;
    constexpr int STAGES = 2;
    Counter stage[STAGES * (MAX_TEAM + 1)];
    for (int i = 0; i < STAGES * Team::counters(threads); i++) stage[i].value = 0;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        Team team(omp_get_thread_num(), omp_get_num_threads(), stage);
        work(team);
    }
}

}  // namespace caesura
