#include "host/tcp/addresses.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <functional>
#include <memory>

namespace mk::host::tcp {

namespace {

struct Candidate {
  Address address;
  std::string interface;
  long speed_mbps;
};

using Interfaces = std::unique_ptr<ifaddrs, decltype(&freeifaddrs)>;

Interfaces interfaces() {
  ifaddrs* first = nullptr;
  if (getifaddrs(&first) != 0) first = nullptr;
  return {first, &freeifaddrs};
}

/// False where it is no IP address.
bool read_address(const sockaddr* from, Address& address) {
  if (from == nullptr) return false;
  address = {};
  address.family = from->sa_family;
  if (from->sa_family == AF_INET) {
    std::memcpy(address.bytes.data(), &reinterpret_cast<const sockaddr_in*>(from)->sin_addr, 4);
    return true;
  }
  if (from->sa_family == AF_INET6) {
    std::memcpy(address.bytes.data(), &reinterpret_cast<const sockaddr_in6*>(from)->sin6_addr, 16);
    return true;
  }
  return false;
}

bool is_link_local(const Address& address) {
  return address.family == AF_INET6 && address.bytes[0] == 0xfe && (address.bytes[1] & 0xc0) == 0x80;
}

/// In Mb/s; 0 where the kernel does not say (virtual interfaces).
long speed_mbps(const std::string& interface) {
  std::ifstream file("/sys/class/net/" + interface + "/speed");
  long speed = 0;
  return file >> speed && speed > 0 ? speed : 0;
}

}  // namespace

Error local_addresses(const std::string& interface, std::vector<Address>& addresses) {
  std::vector<Candidate> found;
  const Interfaces list = interfaces();
  for (const ifaddrs* one = list.get(); one != nullptr; one = one->ifa_next) {
    Address address;
    if ((one->ifa_flags & IFF_UP) == 0 || !read_address(one->ifa_addr, address) || is_link_local(address)) continue;
    const bool wanted = interface.empty() ? (one->ifa_flags & IFF_LOOPBACK) == 0 : interface == one->ifa_name;
    if (wanted) found.push_back({address, one->ifa_name, speed_mbps(one->ifa_name)});
  }
  if (found.empty() && !interface.empty()) {
    return fail({"getifaddrs", interface.c_str()}, ENODEV, "no such interface, or it is down or has no address");
  }
  std::stable_sort(found.begin(), found.end(), [](const Candidate& a, const Candidate& b) {
    if (a.speed_mbps != b.speed_mbps) return a.speed_mbps > b.speed_mbps;
    return a.address.family == AF_INET && b.address.family != AF_INET;
  });
  if (found.size() > kMaxAddresses) found.resize(kMaxAddresses);
  for (const Candidate& one : found) addresses.push_back(one.address);
  return {};
}

u64 host_number() {
  std::string text;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> text;
  struct stat space {};
  if (stat("/proc/self/ns/net", &space) == 0) text.append(1, ':').append(std::to_string(space.st_ino));
  return std::hash<std::string>{}(text);
}

std::string interface_of(const Address& address) {
  const Interfaces list = interfaces();
  for (const ifaddrs* one = list.get(); one != nullptr; one = one->ifa_next) {
    Address other;
    if (read_address(one->ifa_addr, other) && other.family == address.family && other.bytes == address.bytes) {
      return one->ifa_name;
    }
  }
  return {};
}

}  // namespace mk::host::tcp
