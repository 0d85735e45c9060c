// The stand-in's controls as plain C, for tests in Python.
#include "standin.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

using namespace mk;

EXPORT void standin_plug_in(const char* first, const char* second) {
  std::vector<standin::Device> devices(2);
  devices[0].name = first;
  devices[1].name = second;
  standin::set_devices(devices);
}

EXPORT void standin_refuse(u64 base, u64 bytes, int error) {
  standin::refuse(reinterpret_cast<const void*>(base), bytes);
  for (const char* name : {"nic0", "nic1"}) {
    standin::change(name, [&](standin::Device& device) { device.refuses_memory = error; });
  }
}

EXPORT void standin_kill(const char* name) {
  standin::change(name, [](standin::Device& device) { device.is_dead = true; });
}

EXPORT void standin_unplug(const char* name) {
  standin::change(name, [](standin::Device& device) {
    device.ports[0].is_active = false;
    device.fails_after = 0;
  });
}
