// mkproxy_tests [NAME]: one test, or all; `--list` prints their names. Exit status 1 where one fails.
#include <cstdio>
#include <cstring>

#include "check.h"

namespace {

std::vector<mk::test::Test> all_tests() {
  std::vector<mk::test::Test> all;
  for (const auto& some :
       {mk::test::ring_tests(), mk::test::record_tests(), mk::test::window_tests(), mk::test::proxy_tests(),
        mk::test::emulated_tests(), mk::test::tcp_tests(), mk::test::tcp_fault_tests()}) {
    all.insert(all.end(), some.begin(), some.end());
  }
  return all;
}

bool passes(const mk::test::Test& test) {
  try {
    test.run();
    std::printf("ok %s\n", test.name);
    return true;
  } catch (const mk::test::Failure& failure) {
    std::printf("FAILED %s\n  %s\n", test.name, failure.what());
    return false;
  }
}

}  // namespace

int main(int count, char** arguments) {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  const char* wanted = count > 1 ? arguments[1] : nullptr;
  int ran = 0, failed = 0;
  for (const mk::test::Test& test : all_tests()) {
    if (wanted != nullptr && std::strcmp(wanted, "--list") == 0) {
      std::puts(test.name);
      ++ran;
    } else if (wanted == nullptr || std::strcmp(wanted, test.name) == 0) {
      ++ran;
      failed += passes(test) ? 0 : 1;
    }
  }
  return ran == 0 || failed != 0 ? 1 : 0;
}
