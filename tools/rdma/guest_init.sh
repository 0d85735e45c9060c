#!/bin/busybox sh
# PID 1 of the virtual machine, in the initramfs: loads the modules, then enters the host's root.
BB=/bin/busybox
$BB mkdir -p /proc /sys /dev /root
$BB mount -t proc proc /proc
$BB mount -t sysfs sys /sys
$BB mount -t devtmpfs dev /dev

fail() { # STATUS WHAT: QEMU ends with 2 * STATUS + 1
    echo "guest: $2 failed"
    $BB printf "\\$($BB printf %03o "$1")" | $BB dd of=/dev/port bs=1 seek=244 2>/dev/null
    $BB poweroff -f
}

for module in $($BB cat /modules/order); do
    $BB insmod "/modules/$module" || fail 101 "insmod $module"
done
options=trans=virtio,version=9p2000.L,msize=524288
$BB mount -t 9p -o $options,ro,cache=loose hostroot /root || fail 102 "mounting the host's root"
for folder in proc sys dev; do $BB mount --move /$folder /root/$folder; done
$BB mkdir -p /root/dev/shm
for folder in /root/tmp /root/run /root/dev/shm /root/mnt; do $BB mount -t tmpfs tmpfs $folder; done
$BB mkdir -p /root/mnt/io
$BB mount -t 9p -o $options,cache=none io /root/mnt/io || fail 103 "mounting the folder of results"
exec $BB chroot /root /bin/sh /mnt/io/guest_main.sh
