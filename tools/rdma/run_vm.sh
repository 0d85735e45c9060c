#!/bin/bash
# Runs a test script where ibverbs is real: Debian's stock kernel in QEMU, without KVM, with Soft-RoCE devices.
#   run_vm.sh [-i] [-p] [-t SECONDS] [-w FOLDER] [-e NAME=VALUE]... [TEST_SCRIPT]
# -i installs what is missing (Debian, root); without a script that is all. Each machine has rxe0 and rxe1 on a cable of
# its own; -p boots two, where $VM_RANK tells them apart and rxe2 is on the wire between them. -e sets a variable there.
# The guest's userland is this machine's root, read-only over 9p, but /tmp, /run and /mnt. Output of the test goes to
# stdout. Exit status: the test's; 124 no end in time; 100 it can't run here, and stderr says why; 101-105 no machine
# that booted and has its devices, and stderr has its console.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
checkout=$(cd "$here/../.." && pwd)
work=$checkout/build/rdma limit=240 install='' pair='' variables=''
while getopts ipt:w:e: option; do
    case $option in
        i) install=1 ;; p) pair=1 ;; t) limit=$OPTARG ;; w) work=$OPTARG ;; e) variables+=" $OPTARG" ;; *) exit 100 ;;
    esac
done
shift $((OPTIND - 1))
test_script=${1:-}
mkdir -p "$work"
refuse() { # what can't be had here; a later call without -i says it again
    [ -z "$install" ] || echo "$*" >"$work/refused"
    echo "run_vm.sh: $*" >&2
    exit 100
}
missing_here() { # WHAT
    [ -n "$install" ] || refuse "needs $1 ($(cat "$work/refused" 2>/dev/null || echo 'tools/rdma/run_vm.sh -i gets it'))"
    [ "$(id -u)" = 0 ] || refuse "needs $1, and only root can install it"
}
fetch() { # APT-GET'S ARGUMENTS: in bounded time, also where there is no network
    DEBIAN_FRONTEND=noninteractive timeout 150 apt-get -q -o Acquire::Retries=1 -o Acquire::http::Timeout=15 \
        -o DPkg::Lock::Timeout=60 "$@" >>"$work/apt.log" 2>&1 ||
        refuse "apt-get $1 failed: $(grep '^[EW]:' "$work/apt.log" | head -n 1)"
}
rm -f "$work/apt.log"
[ -z "$install" ] || rm -f "$work/refused"
[ "$(uname -m)" = x86_64 ] || refuse "knows x86_64 only, this is $(uname -m)"
command -v dpkg >/dev/null && command -v apt-get >/dev/null || refuse "needs Debian's packages, here is no apt"

case $checkout/ in
    /tmp/* | /run/* | /mnt/*) refuse "the machine would not see $checkout: it has a /tmp, /run and /mnt of its own" ;;
esac

# python3-pyverbs is the program that is not ours; it needs the system's own python3
packages=(qemu-system-x86 busybox-static cpio kmod iproute2 ibverbs-providers libibverbs-dev python3-pyverbs)
missing=()
for package in "${packages[@]}"; do dpkg -s "$package" >/dev/null 2>&1 || missing+=("$package"); done
if ((${#missing[@]})); then
    missing_here "${missing[*]}"
    echo "run_vm.sh: apt-get install ${missing[*]}" >&2
    fetch update
    fetch install -y --no-install-recommends "${missing[@]}"
fi

# The cloud kernel has no Soft-RoCE; the stock one has it as a module.
kernel=$work/kernel
if [ ! -e "$kernel/release" ]; then
    missing_here "Debian's kernel package linux-image-amd64"
    image=$(apt-cache depends linux-image-amd64 2>/dev/null | awk '/Depends:/ {print $2; exit}')
    if [ -z "$image" ]; then
        fetch update
        image=$(apt-cache depends linux-image-amd64 2>/dev/null | awk '/Depends:/ {print $2; exit}')
    fi
    [ -n "$image" ] || refuse "needs Debian's kernel package linux-image-amd64, which apt does not know here"
    rm -rf "$kernel" "$work/$image"_*.deb && mkdir -p "$kernel"
    (cd "$work" && fetch download "$image") || exit 100
    dpkg --fsys-tarfile "$work/$image"_*.deb | tar -x -C "$kernel" --exclude=./usr/share \
        --exclude='*/kernel/sound' --exclude='*/kernel/drivers/gpu' --exclude='*/kernel/drivers/media'
    rm -f "$work/$image"_*.deb
    [ -d "$kernel/lib/modules" ] || ln -s usr/lib "$kernel/lib"
    depmod -b "$kernel" "${image#linux-image-}"
    echo "${image#linux-image-}" >"$kernel/release"
fi
[ -n "$test_script" ] || exit 0
release=$(cat "$kernel/release")

# Modules in load order. crc32_generic by name: Soft-RoCE asks for it through modprobe, which the guest has not.
root=$work/initramfs
rm -rf "$root" && mkdir -p "$root"/{bin,modules}
cp /bin/busybox "$root/bin/busybox" && ln -s busybox "$root/bin/sh"
cp "$here/guest_init.sh" "$root/init" && chmod +x "$root/init"
for module in virtio_pci virtio_net 9pnet_virtio 9p veth crc32_generic rdma_ucm rdma_rxe; do
    modprobe -d "$kernel" -S "$release" --show-depends "$module" | awk '$1 == "insmod" {print $2}'
done | awk '!seen[$0]++' | while read -r file; do
    name=$(basename "${file%.xz}")
    case $file in *.xz) xz -dc "$file" ;; *) cat "$file" ;; esac >"$root/modules/$name"
    echo "$name"
done >"$work/order"
mv "$work/order" "$root/modules/order"
(cd "$root" && find . | cpio -o -H newc --quiet | gzip -1) >"$work/initramfs.gz"

# boot NAME CONFIG [OPTION...]: one machine; its files are in $work/NAME
boot() {
    local io=$work/$1 config=$2
    shift 2
    rm -rf "$io" && mkdir -p "$io"
    cp "$here/guest_main.sh" "$io/" && cp "$test_script" "$io/test.sh"
    echo "$config CHECKOUT=$checkout$variables" >"$io/config"
    # Always TCG: /dev/kvm can be there and still not work. nokaslr and mitigations=off shorten the boot. Emulated, "rep
    # movsb" moves byte by byte: without erms and fsrm nobody takes it for fast. With the HPET each look at the clock
    # leaves the guest; tsc=reliable reads the host's. One processor needs no atomics and no kicks. no_timer_check: on a
    # busy host the boot would find that too few ticks had come and give up ("IO-APIC + timer doesn't work").
    timeout "$limit" qemu-system-x86_64 -accel tcg -machine pc,hpet=off -cpu max,-erms,-fsrm -smp 1 -m 2048 \
        -nodefaults -no-reboot -display none \
        -serial stdio -device isa-debug-exit,iobase=0xf4,iosize=0x01 \
        -kernel "$kernel/boot/vmlinuz-$release" -initrd "$work/initramfs.gz" \
        -append "console=ttyS0 quiet panic=-1 mitigations=off nokaslr no_timer_check random.trust_cpu=on tsc=reliable \
clocksource=tsc" \
        -fsdev local,id=root,path=/,security_model=none,readonly=on,multidevs=remap \
        -device virtio-9p-pci,fsdev=root,mount_tag=hostroot \
        -fsdev local,id=io,path="$io",security_model=none -device virtio-9p-pci,fsdev=io,mount_tag=io \
        "$@" </dev/null >"$io/console" 2>&1 || [ $? != 124 ] || [ ! -e "$io/output" ] || echo 124 >"$io/status"
    [ -e "$io/status" ] || echo 105 >"$io/status"
}

if [ -z "$pair" ]; then
    names=(one)
    boot one "VM_RANK=0 VM_ADDRESS=''"
else
    names=(a b)
    wire=$work/wire
    rm -f "$wire"
    network=stream,id=n,addr.type=unix,addr.path=$wire
    card=virtio-net-pci,netdev=n,host_mtu=4200
    boot a "VM_RANK=0 VM_ADDRESS=10.78.0.1" -netdev "$network,server=on" -device "$card,mac=02:00:00:00:00:0a" &
    for ((i = 0; i < 200; i++)); do [ -S "$wire" ] && break; sleep 0.05; done
    boot b "VM_RANK=1 VM_ADDRESS=10.78.0.2" -netdev "$network,server=off" -device "$card,mac=02:00:00:00:00:0b" &
    wait
fi
worst=0
for name in "${names[@]}"; do
    status=$(cat "$work/$name/status")
    ((status < 100)) || sed "s/^/console of $name: /" "$work/$name/console" >&2
    [ ! -e "$work/$name/output" ] || sed "s/^/${pair:+$name: }/" "$work/$name/output"
    ((status <= worst)) || worst=$status
done
exit "$worst"
