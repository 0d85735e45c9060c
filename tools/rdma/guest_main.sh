#!/bin/sh
# In the virtual machine, with the host's root: makes the Soft-RoCE devices, runs /mnt/io/test.sh, reports its status.
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/tmp
set -a
. /mnt/io/config
set +a

finish() { # QEMU's own status can't hold ours, so a file does
    echo "$1" >/mnt/io/status
    sync
    printf '\001' | dd of=/dev/port bs=1 seek=244 2>/dev/null
    busybox poweroff -f
}
need() { "$@" || { echo "guest: failed: $*"; finish 104; }; }

ulimit -l unlimited
need ip link set lo up
if [ -n "$VM_ADDRESS" ]; then # one of two machines: rxe2 is on the wire between them
    device=$(ls /sys/class/net | grep -v lo | head -n 1)
    need ip link set "$device" name wire
    need ip address add "$VM_ADDRESS/24" dev wire
    need ip link set wire mtu 4200 up
    need rdma link add rxe2 type rxe netdev wire
fi
# two devices, joined by a virtual cable
need ip link add va address 02:00:00:00:00:0a mtu 4200 type veth peer name vb address 02:00:00:00:00:0b mtu 4200
need ip address add 10.77.0.1/32 dev va
need ip address add 10.77.0.2/32 dev vb
need ip link set va up
need ip link set vb up
# Both addresses are local, and local packets go over lo, where no Soft-RoCE device listens. With these rules what
# this machine sends to them goes over the cable, and what comes from the cable is local.
for name in all va vb; do
    echo 1 >/proc/sys/net/ipv4/conf/$name/accept_local
    echo 0 >/proc/sys/net/ipv4/conf/$name/rp_filter
done
need ip route add 10.77.0.2 dev va src 10.77.0.1 table 101
need ip route add 10.77.0.1 dev vb src 10.77.0.2 table 102
need ip rule add pref 10 iif lo to 10.77.0.2 lookup 101
need ip rule add pref 11 iif lo to 10.77.0.1 lookup 102
need ip rule add pref 20 lookup local
need ip rule del pref 0
need ip neigh add 10.77.0.2 lladdr 02:00:00:00:00:0b dev va nud permanent
need ip neigh add 10.77.0.1 lladdr 02:00:00:00:00:0a dev vb nud permanent
need rdma link add rxe0 type rxe netdev va
need rdma link add rxe1 type rxe netdev vb
# addresses of the devices appear a moment later: the transport has to wait for them, so we don't
cd "$CHECKOUT" || finish 104
sh /mnt/io/test.sh >/mnt/io/output 2>&1
finish $?
