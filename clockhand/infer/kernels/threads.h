// Threads of our own, which wait for work and for each other by looking at a number, and only sleep after a while: a
// step has a hundred places where all must wait, each for less time than waking a thread takes.

#pragma once

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <thread>
#include <vector>

constexpr int MOST_THREADS = 1024, LOOKS = 4000;

INLINE void relax() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Until `number` is no longer `old`: looks for some time, then sleeps.
INLINE void await_change(const std::atomic<int>& number, int old, int looks) {
    for (int i = 0; i < looks; i++) {
        if (number.load(std::memory_order_acquire) != old) return;
        relax();
    }
    while (number.load(std::memory_order_acquire) == old) number.wait(old, std::memory_order_acquire);
}

// The threads of one step, this one included.
class Team {
   public:
    int size = 1;

    // Everybody is here before anybody goes on.
    void meet() {
        if (size == 1) return;
        const int round = rounds.load(std::memory_order_relaxed);
        if (arrived.fetch_add(1, std::memory_order_acq_rel) == size - 1) {
            arrived.store(0, std::memory_order_relaxed);
            rounds.fetch_add(1, std::memory_order_release);
            rounds.notify_all();
        } else {
            await_change(rounds, round, looks);
        }
    }

    // A number that nobody else gets, from 0 on, in the phase that the caller is in. All call it in the same phases.
    int take(int phase) { return taken[phase].fetch_add(1, std::memory_order_relaxed); }

    void begin(int threads, int phases) {
        size = threads;
        looks = threads <= (int)std::thread::hardware_concurrency() ? LOOKS : 20;
        if ((int)taken.size() < phases) taken = std::vector<std::atomic<int>>(phases);
        for (auto& each : taken) each.store(0, std::memory_order_relaxed);
    }

   private:
    std::atomic<int> arrived{0}, rounds{0};
    std::vector<std::atomic<int>> taken;
    int looks = 0;
};

// The threads that all steps of this process share; one step at a time.
class Pool {
   public:
    static Pool& of_process() {
        static Pool* pool = nullptr;
        static std::mutex making;
        const std::lock_guard<std::mutex> lock(making);
        if (pool == nullptr || pool->process != getpid()) pool = new Pool;  // after a fork the threads are gone
        return *pool;
    }

    // work(team, number) on so many threads, of which the caller is number 0.
    template <class Work>
    void run(int threads, int phases, Work&& work) {
        const std::lock_guard<std::mutex> lock(one_step);
        team.begin(threads, phases);
        if (threads > 1) {
            while ((int)helpers.size() < threads - 1) {
                const int number = (int)helpers.size() + 1;
                helpers.emplace_back([this, number, seen = call_and_size.load()] { serve(number, seen); });
                helpers.back().detach();
            }
            call = [](void* context, Team& team, int number) { (*(Work*)context)(team, number); };
            context = (void*)&work;
            busy.store(threads - 1, std::memory_order_relaxed);
            calls = (calls + 1) % (1 << 20);
            call_and_size.store(calls * MOST_THREADS + threads, std::memory_order_release);
            call_and_size.notify_all();
        }
        work(team, 0);
        for (int left; (left = busy.load(std::memory_order_acquire)) != 0;) await_change(busy, left, LOOKS);
    }

   private:
    const pid_t process = getpid();
    std::mutex one_step;
    Team team;
    std::vector<std::thread> helpers;
    int calls = 0;
    std::atomic<int> call_and_size{0}, busy{0};  // one number, so that who is not wanted reads nothing else of a step
    void (*call)(void*, Team&, int) = nullptr;
    void* context = nullptr;

    void serve(int number, int seen) {
        for (;;) {
            await_change(call_and_size, seen, LOOKS);
            seen = call_and_size.load(std::memory_order_acquire);
            if (number >= seen % MOST_THREADS) continue;
            call(context, team, number);
            busy.fetch_sub(1, std::memory_order_release);
            busy.notify_all();
        }
    }
};
