#pragma once
// A copy engine that takes a while, as a GPU's does, and flag stores that go with it. One proxy thread uses it.
#include <atomic>
#include <cerrno>
#include <cstring>
#include <vector>

#include "abi/proxy_records.h"

namespace mk::test {

struct SlowEngine {
  struct Job {
    void* to;
    const void* from;
    u64 bytes, token;
    int looks;
  };
  std::vector<Job> jobs;

  static i32 start(void* context, void* to, const void* from, u64 bytes, u64 token) {
    static_cast<SlowEngine*>(context)->jobs.push_back({to, from, bytes, token, 3});
    return 0;
  }
  static i32 finished(void* context, u64 token) {
    auto& jobs = static_cast<SlowEngine*>(context)->jobs;
    for (auto job = jobs.begin(); job != jobs.end(); ++job) {
      if (job->token != token) continue;
      if (--job->looks > 0) return 0;
      std::memcpy(job->to, job->from, job->bytes);
      jobs.erase(job);
      return 1;
    }
    return -ENOENT;
  }
  static i32 write(void*, void* flag, u32 value) {
    std::atomic_ref<u32>(*static_cast<u32*>(flag)).store(value, std::memory_order_release);
    return 0;
  }
};

inline void use(SlowEngine& engine, ProxyOptions& options) {
  options.copy_context = reinterpret_cast<u64>(&engine);
  options.copy_start = reinterpret_cast<u64>(&SlowEngine::start);
  options.copy_finished = reinterpret_cast<u64>(&SlowEngine::finished);
  options.flag_context = options.copy_context;
  options.flag_write = reinterpret_cast<u64>(&SlowEngine::write);
}

}  // namespace mk::test
