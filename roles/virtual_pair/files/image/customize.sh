#!/bin/sh
# mmdebstrap hook: make the tree in $1 look like a Spark after its first boot, then write it to $OUT.
set -eu
r=$1
chroot "$r" useradd -m -s /bin/bash -u 1000 spark
printf 'spark ALL=(ALL) NOPASSWD: ALL\n' >"$r/etc/sudoers.d/spark"
chmod 440 "$r/etc/sudoers.d/spark"
# Identity (host name, keys, addresses, machine-id) is written into each guest's own copy later.
rm -f "$r/etc/hostname" "$r"/etc/ssh/ssh_host_*
: >"$r/etc/machine-id"
printf '/dev/vda / ext4 rw,noatime 0 1\n/dev/disk/by-label/GOODPUT_MEDIA /media/goodput ext4 ro,nofail 0 0\n' >"$r/etc/fstab"
mkdir -p "$r/media/goodput"
rm -f "$r"/etc/apt/sources.list.d/*
echo 'deb [trusted=yes] file:/media/goodput/mirror ./' >"$r/etc/apt/sources.list"
# A rail without a DHCP server must not keep NetworkManager busy.
printf '[main]\nno-auto-default=*\n' >"$r/etc/NetworkManager/conf.d/90-no-auto-default.conf"
cp "$STANDINS/virtual-pair-rails.service" "$r/etc/systemd/system/"
cp "$STANDINS/virtual-pair-rails" "$r/usr/local/sbin/"
chmod 755 "$r/usr/local/sbin/virtual-pair-rails"
# Programs that stand in for hardware; each says so in --version or its first line.
install -m 755 -t "$r/usr/local/bin" "$STANDINS"/bin/*
chroot "$r" systemctl -q enable NetworkManager ssh serial-getty@ttyS0 virtual-pair-rails
chroot "$r" systemctl -q mask apt-daily.timer apt-daily-upgrade.timer e2scrub_reap.service e2scrub_all.timer fstrim.timer \
  dpkg-db-backup.timer systemd-networkd.service systemd-networkd.socket systemd-networkd-wait-online.service
printf 'MODULES=list\nCOMPRESS=zstd\n' >"$r/etc/initramfs-tools/conf.d/small"
printf 'virtio_pci\nvirtio_blk\next4\n' >>"$r/etc/initramfs-tools/modules"
chroot "$r" update-initramfs -u >&2
cp -L "$r/vmlinuz" "$r/initrd.img" "$OUT/"
