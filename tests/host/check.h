#pragma once
// Tests are functions in a table; a failed CHECK throws.
#include <functional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace mk::test {

struct Failure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Test {
  const char* name;  ///< says the behaviour
  std::function<void()> run;
};

std::vector<Test> ring_tests();
std::vector<Test> record_tests();
std::vector<Test> window_tests();
std::vector<Test> proxy_tests();
std::vector<Test> emulated_tests();
std::vector<Test> cuda_tests();
std::vector<Test> tcp_tests();
std::vector<Test> tcp_fault_tests();
std::vector<Test> verbs_tests();         ///< over a stand-in for libibverbs; none where its header was missing
std::vector<Test> registration_tests();
std::vector<Test> bounce_tests();
std::vector<Test> srd_tests();

[[noreturn]] inline void fail_at(const char* file, int line, const std::string& what) {
  throw Failure(std::string(file) + ":" + std::to_string(line) + ": " + what);
}

template <class A, class B>
void check_equal(const A& a, const B& b, const char* file, int line, const char* text) {
  if (a == b) return;
  std::ostringstream out;
  out << text << ": " << a << " and " << b;
  fail_at(file, line, out.str());
}

}  // namespace mk::test

#define CHECK(condition) \
  if (!(condition)) ::mk::test::fail_at(__FILE__, __LINE__, #condition)
#define CHECK_EQUAL(a, b) ::mk::test::check_equal((a), (b), __FILE__, __LINE__, #a " == " #b)
