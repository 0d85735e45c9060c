// Counters and timeline while a thread writes them; arrivals that are counted.
#include <atomic>
#include <thread>

#include "check.h"
#include "host/arrivals.h"
#include "host/records.h"

namespace mk::test {

namespace {

using namespace mk::host;

ProxyEvent event_of(u64 number) {
  const u32 low = static_cast<u32>(number);
  return {number, number * 3, ~number, low, low + 1, low + 2, low + 3};
}

bool is_whole(const ProxyEvent& event) {
  const ProxyEvent expected = event_of(event.time_ns);
  return event.ticket == expected.ticket && event.bytes == expected.bytes && event.peer == expected.peer &&
         event.chunk == expected.chunk && event.epoch == expected.epoch &&
         event.kind_and_lane == expected.kind_and_lane;
}

void a_timeline_keeps_the_last_events_in_order() {
  Timeline timeline(8);
  for (u64 i = 0; i < 20; ++i) timeline.add(event_of(i));
  ProxyEvent events[16];
  u64 next = 0;
  CHECK_EQUAL(timeline.read(0, events, next), 8u);
  CHECK_EQUAL(next, 20u);
  for (u32 i = 0; i < 8; ++i) CHECK_EQUAL(events[i].time_ns, u64{12 + i});
  CHECK_EQUAL(timeline.read(next, events, next), 0u);
  CHECK_EQUAL(timeline.read(18, {events, 1}, next), 1u);
  CHECK_EQUAL(next, 19u);
}

void a_timeline_read_while_it_is_written_has_no_torn_event() {
  Timeline timeline(64);
  std::atomic<bool> done{false};
  std::thread writer([&] {
    for (u64 i = 0; i < 200'000; ++i) timeline.add(event_of(i));
    done = true;
  });
  ProxyEvent events[64];
  u64 next = 0, seen = 0, last = 0;
  bool sound = true;
  while (!done) {
    const u32 count = timeline.read(next, events, next);
    for (u32 i = 0; i < count; ++i) {
      sound = sound && is_whole(events[i]) && (seen + i == 0 || events[i].time_ns > last);
      last = events[i].time_ns;
    }
    seen += count;
  }
  writer.join();
  CHECK(sound);
  CHECK_EQUAL(timeline.read(next, events, next) + seen > 0, true);
  CHECK_EQUAL(next, 200'000u);
}

void arrivals_count_pieces_in_any_order() {
  Arrivals arrivals(4);
  Error error;
  CHECK_EQUAL(decode(encode({3, 5})).slot, 3u);
  CHECK_EQUAL(decode(encode({kMaxSlots - 1, kMaxPieces})).pieces, kMaxPieces);
  for (int round = 0; round < 3; ++round) {
    CHECK_EQUAL(arrivals.add(1, encode({0, 3}), error), 0);
    CHECK_EQUAL(arrivals.add(2, encode({1, 2}), error), 0);
    CHECK_EQUAL(arrivals.add(1, encode({0, 3}), error), 0);
    CHECK_EQUAL(arrivals.add(2, encode({1, 2}), error), 1);
    CHECK_EQUAL(arrivals.add(1, encode({0, 3}), error), 1);
    CHECK_EQUAL(arrivals.add(3, encode({3, 1}), error), 1);
  }
  CHECK(!error);
}

void arrivals_refuse_what_cannot_be() {
  Arrivals arrivals(2);
  Error error;
  CHECK_EQUAL(arrivals.add(1, encode({2, 1}), error), -1);
  CHECK_EQUAL(error.number, EPROTO);
  CHECK_EQUAL(arrivals.add(1, encode({0, 0}), error), -1);
  CHECK_EQUAL(arrivals.add(1, encode({0, 3}), error), 0);
  CHECK_EQUAL(arrivals.add(1, encode({0, 2}), error), -1);
  CHECK_EQUAL(arrivals.add(0, encode({0, 3}), error), -1);
  CHECK_EQUAL(error.peer, 0);
}

}  // namespace

std::vector<Test> record_tests() {
  return {{"records/a_timeline_keeps_the_last_events_in_order", a_timeline_keeps_the_last_events_in_order},
          {"records/a_timeline_read_while_it_is_written_has_no_torn_event",
           a_timeline_read_while_it_is_written_has_no_torn_event},
          {"records/arrivals_count_pieces_in_any_order", arrivals_count_pieces_in_any_order},
          {"records/arrivals_refuse_what_cannot_be", arrivals_refuse_what_cannot_be}};
}

}  // namespace mk::test
