// mkproxy_rdma_tests [NAME]: all tests, or those whose name begins so. They need the devices rxe0 and rxe1.
#include <chrono>
#include <cstdio>
#include <cstring>

#include "verbs_tests.h"

namespace {

bool passes(const mk::test::Test& test) {
  const auto started = std::chrono::steady_clock::now();
  const auto seconds = [&] {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - started).count();
  };
  try {
    test.run();
    std::printf("ok %s  %.1f s\n", test.name, seconds());
    return true;
  } catch (const mk::test::Failure& failure) {
    std::printf("FAILED %s  %.1f s\n  %s\n", test.name, seconds(), failure.what());
    return false;
  }
}

}  // namespace

int main(int count, char** arguments) {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  const char* prefix = count > 1 ? arguments[1] : "";
  int ran = 0, failed = 0;
  for (const auto& some : {mk::test::exchange_tests(), mk::test::fault_tests()}) {
    for (const mk::test::Test& test : some) {
      if (std::strncmp(test.name, prefix, std::strlen(prefix)) != 0) continue;
      ++ran;
      failed += passes(test) ? 0 : 1;
    }
  }
  return ran == 0 || failed != 0 ? 1 : 0;
}
