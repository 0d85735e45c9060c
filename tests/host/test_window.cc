// The window of commands in flight: queues in order, completions in any order, retirement in order.
#include <algorithm>
#include <random>

#include "check.h"
#include "host/in_flight.h"

namespace mk::test {

namespace {

using namespace mk::host;

InFlight entry_of(u64 ticket) { return {{ticket, 0, 0, ticket, 0, 0}, 0, 0, 0, false, false}; }

void queues_give_commands_in_order_and_keep_what_was_not_taken() {
  Window window(64, 3);
  for (u64 ticket = 0; ticket < 30; ++ticket) {
    window.enter(static_cast<u32>(ticket % 3), entry_of(ticket), 100 + ticket);
  }
  CHECK_EQUAL(window.queued(1), 10u);
  CHECK_EQUAL(window.head_since(1), 101u);
  Write writes[8];
  CHECK_EQUAL(window.head(1, writes), 8u);
  for (u32 i = 0; i < 8; ++i) CHECK_EQUAL(writes[i].ticket, u64{1 + 3 * i});
  window.pop(1, 3, 500);
  CHECK_EQUAL(window.head_since(1), 500u);
  CHECK_EQUAL(window.head(1, writes), 7u);
  CHECK_EQUAL(writes[0].ticket, 10u);
  CHECK(window.in_flight(4));
  CHECK(!window.in_flight(10));
  CHECK_EQUAL(window.waiting(), 27u);
}

void tickets_retire_in_order_whatever_the_order_of_completion() {
  std::mt19937 random(7);
  for (int round = 0; round < 200; ++round) {
    Window window(16, 2);
    std::vector<u64> flying;
    u64 entered = 0, completed = 0;
    std::vector<bool> done(400);
    while (completed < done.size()) {
      while (!window.full() && entered < done.size() && random() % 4 != 0) {
        const u32 queue = static_cast<u32>(random() % 2);
        window.enter(queue, entry_of(entered), 0);
        window.pop(queue, 1, 0);
        flying.push_back(entered++);
      }
      if (flying.empty()) continue;
      std::swap(flying[random() % flying.size()], flying.back());
      CHECK(window.in_flight(flying.back()));
      window.complete(flying.back());
      done[flying.back()] = true;
      flying.pop_back();
      ++completed;
      const auto first_open = std::find(done.begin(), done.end(), false) - done.begin();
      CHECK_EQUAL(window.retired(), static_cast<u64>(first_open));
    }
    CHECK_EQUAL(window.outstanding(), 0u);
  }
}

}  // namespace

std::vector<Test> window_tests() {
  return {{"window/queues_give_commands_in_order_and_keep_what_was_not_taken",
           queues_give_commands_in_order_and_keep_what_was_not_taken},
          {"window/tickets_retire_in_order_whatever_the_order_of_completion",
           tickets_retire_in_order_whatever_the_order_of_completion}};
}

}  // namespace mk::test
