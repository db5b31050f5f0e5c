//! From recipe to command line. Pure; the golden test is the review.

use coracle_hypervisor::{Accelerator, Disk, Nic, NicBackend, VmRecipe};

/// Name of the port that the guest agent looks for.
const GUEST_PORT: &str = "dev.coracle.guest.0";

/// The arguments of `qemu-system-x86_64` for this VM.
///
/// `tsc_khz` is the host's time-stamp counter rate: under TCG the guest kernel
/// of a microvm with ACPI cannot calibrate it and hangs without being told.
#[must_use]
pub fn argv(recipe: &VmRecipe, accelerator: Accelerator, tsc_khz: u64) -> Vec<String> {
    let mut args = Args::default();
    args.flag("-nodefaults").flag("-no-user-config").flag("-no-reboot");
    args.pair("-display", "none");
    args.pair("-name", format!("coracle-{},debug-threads=on", recipe.id));
    args.pair("-sandbox", "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny");
    args.pair("-M", "microvm,acpi=on,x-option-roms=off,rtc=on");
    args.pair("-accel", accelerator.as_str());
    args.pair("-cpu", "max");
    args.pair("-smp", recipe.vcpus.get().to_string());
    args.pair("-m", recipe.memory.get().to_string());
    args.pair("-kernel", escape(&recipe.kernel.display().to_string()));
    args.pair("-initrd", escape(&recipe.initrd.display().to_string()));
    args.pair("-append", kernel_command_line(accelerator, tsc_khz));
    let run = escape(&recipe.run_dir.display().to_string());
    args.pair("-chardev", format!("socket,id=console,path={run}/console.sock,server=on,wait=off"));
    args.pair("-serial", "chardev:console");
    args.pair("-device", "virtio-serial-device");
    args.pair("-chardev", format!("socket,id=guest,path={run}/guest.sock,server=on,wait=off"));
    args.pair("-device", format!("virtserialport,chardev=guest,name={GUEST_PORT},id=guest"));
    for (n, disk) in recipe.disks.iter().enumerate() {
        args.disk(n, disk);
    }
    if let Some(nic) = &recipe.nic {
        args.nic(nic);
    }
    args.pair("-device", "virtio-rng-device");
    args.pair("-qmp", format!("unix:{run}/qmp.sock,server=on,wait=off"));
    args.0
}

/// As [`argv`] with the accelerator of the recipe and the rate of this host.
#[must_use]
pub fn argv_for_this_host(recipe: &VmRecipe) -> Vec<String> {
    argv(recipe, recipe.accelerator, crate::tsc::khz())
}

/// `reboot=t` ends the VMM by a triple fault, together with `-no-reboot`. The self-tests
/// of the kernel's cryptography and its certificate list are most of a boot under
/// TCG, and nothing in the guest uses them.
fn kernel_command_line(accelerator: Accelerator, tsc_khz: u64) -> String {
    let mut line = "console=ttyS0 quiet reboot=t panic=-1 \
        cryptomgr.notests=1 initcall_blacklist=load_system_certificate_list"
        .to_owned();
    if accelerator == Accelerator::Tcg {
        line += &format!(" tsc_early_khz={tsc_khz} tsc=reliable no_timer_check lapic=notscdeadline");
    }
    line
}

#[derive(Default)]
struct Args(Vec<String>);

impl Args {
    fn flag(&mut self, name: &str) -> &mut Self {
        self.0.push(name.to_owned());
        self
    }

    fn pair(&mut self, name: &str, value: impl Into<String>) {
        self.0.extend([name.to_owned(), value.into()]);
    }

    fn disk(&mut self, n: usize, disk: &Disk) {
        let path = escape(&disk.path.display().to_string());
        let read_only = if disk.read_only { "on" } else { "off" };
        self.pair(
            "-blockdev",
            format!("driver=file,node-name=file{n},filename={path},read-only={read_only},discard=unmap"),
        );
        self.pair("-blockdev", format!("driver=raw,node-name=disk{n},file=file{n},read-only={read_only}"));
        self.pair("-device", format!("virtio-blk-device,drive=disk{n},id=disk{n},serial=disk{n}"));
    }

    fn nic(&mut self, nic: &Nic) {
        let netdev = match &nic.backend {
            NicBackend::Tap { name } => {
                format!("tap,id=net0,ifname={},script=no,downscript=no", escape(name))
            }
            NicBackend::User { forwards } => {
                let forwards = forwards
                    .iter()
                    .map(|f| format!(",hostfwd=tcp:{}:{}-:{}", f.host_address, f.host_port, f.guest_port));
                format!("user,id=net0{}", forwards.collect::<String>())
            }
        };
        self.pair("-netdev", netdev);
        self.pair("-device", format!("virtio-net-device,netdev=net0,mac={},id=nic0", nic.mac));
    }
}

/// In QEMU's option strings a comma inside a value is doubled.
fn escape(value: &str) -> String {
    value.replace(',', ",,")
}

#[cfg(test)]
mod tests {
    use coracle_hypervisor::Forward;
    use coracle_types::{MacAddr, VmId};

    use super::*;

    fn recipe(backend: NicBackend) -> VmRecipe {
        let id = VmId::of_name(&"web".parse().unwrap());
        VmRecipe {
            vcpus: 2.try_into().unwrap(),
            memory: 256.try_into().unwrap(),
            kernel: "/boot/vmlinuz".into(),
            initrd: "/boot/initrd".into(),
            disks: vec![
                Disk { path: "/images/a.erofs".into(), read_only: true },
                Disk { path: "/vms/we,b/overlay.ext4".into(), read_only: false },
            ],
            nic: Some(Nic { mac: MacAddr::of(&id), backend }),
            state_dir: "/state/vms/web".into(),
            run_dir: "/run/coracle/0123/abc".into(),
            accelerator: Accelerator::Tcg,
            id,
        }
    }

    #[test]
    fn golden_tap_under_tcg() {
        let recipe = recipe(NicBackend::Tap { name: "ct0123".into() });
        insta::assert_snapshot!(argv(&recipe, Accelerator::Tcg, 2_500_000).join("\n"));
    }

    #[test]
    fn golden_user_under_kvm() {
        let forward = Forward { host_address: [127, 0, 0, 1].into(), host_port: 8080, guest_port: 80 };
        let recipe = recipe(NicBackend::User { forwards: vec![forward] });
        insta::assert_snapshot!(argv(&recipe, Accelerator::Kvm, 2_500_000).join("\n"));
    }
}
