// mkproxy_tests [BEGINNING | --without NAME... | --list]: tests whose names begin so, all, all but some, or the names.
// Exit status 1 where one fails.
#include <algorithm>
#include <chrono>
#include <cstdio>

#include "check.h"

namespace {

std::vector<mk::test::Test> all_tests() {
  std::vector<mk::test::Test> all;
  for (const auto& some :
       {mk::test::ring_tests(), mk::test::record_tests(), mk::test::window_tests(), mk::test::proxy_tests(),
        mk::test::emulated_tests(), mk::test::cuda_tests(), mk::test::tcp_tests(), mk::test::tcp_fault_tests()}) {
    all.insert(all.end(), some.begin(), some.end());
  }
#if MK_WITH_VERBS && MK_WITH_EFA
  for (const auto& some : {mk::test::verbs_tests(), mk::test::registration_tests(), mk::test::bounce_tests(),
                           mk::test::srd_tests()}) {
    all.insert(all.end(), some.begin(), some.end());
  }
#endif
  return all;
}

bool passes(const mk::test::Test& test) {
  const auto started = std::chrono::steady_clock::now();
  try {
    test.run();
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - started;
    std::printf("ok %s  %.1f s\n", test.name, took.count());
    return true;
  } catch (const mk::test::Failure& failure) {
    std::printf("FAILED %s\n  %s\n", test.name, failure.what());
    return false;
  }
}

}  // namespace

int main(int count, char** arguments) {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  const std::vector<std::string> given(arguments + 1, arguments + count);
  const std::string first = given.empty() ? "" : given[0];
  const bool lists = first == "--list", leaves_out = first == "--without";
  int ran = 0, failed = 0;
  for (const mk::test::Test& test : all_tests()) {
    const bool is_named = std::find(given.begin(), given.end(), test.name) != given.end();
    const bool runs = leaves_out ? !is_named : lists || std::string(test.name).starts_with(first);
    if (!runs) continue;
    ++ran;
    if (lists) {
      std::puts(test.name);
    } else {
      failed += passes(test) ? 0 : 1;
    }
  }
  return ran == 0 || failed != 0 ? 1 : 0;
}
