//! Guest of forty instructions that distinguishes a working KVM from one that only opens. The guest runs in long mode and takes
//! a page fault, a locked 16-byte exchange, a breakpoint trap and two million turns of a loop. The usual smoke test (`out`,
//! `hlt`) passes on hosts where none of these works.

use std::io::Write;
use std::path::Path;

/// Runs the payload on `device` and prints its steps to `out`; the last line is `ok …` or the failure. Call it in a process of
/// its own that may be killed.
///
/// # Errors
/// When `out` cannot be written.
#[cfg(target_arch = "x86_64")]
pub fn run_payload(device: &Path, out: &mut dyn Write) -> std::io::Result<bool> {
    match x86::run(device) {
        Ok(loops_ms) => {
            writeln!(out, "ok guest code ran in long mode (2 M loops in {loops_ms} ms)").map(|()| true)
        }
        Err(reason) => writeln!(out, "{reason}").map(|()| false),
    }
}

/// Reports that there is no payload for this architecture.
///
/// # Errors
/// When `out` cannot be written.
#[cfg(not(target_arch = "x86_64"))]
pub fn run_payload(_device: &Path, out: &mut dyn Write) -> std::io::Result<bool> {
    writeln!(out, "no KVM probe for this architecture").map(|()| false)
}

#[cfg(target_arch = "x86_64")]
#[allow(unsafe_code, reason = "guest memory and code of a virtual CPU")]
mod x86 {
    use std::ffi::CString;
    use std::os::unix::ffi::OsStrExt;
    use std::path::Path;
    use std::time::Instant;

    use kvm_bindings::{kvm_regs, kvm_segment, kvm_userspace_memory_region};
    use kvm_ioctls::{Kvm, VcpuExit, VcpuFd, VmFd};

    const MEMORY: usize = 2 << 20;
    const PAGE_TABLES: u64 = 0x1000;
    const GDT: u64 = 0x4000;
    const IDT: u64 = 0x5000;
    const SCRATCH: u64 = 0x8000;
    const STACK: u64 = 0xf000;
    const CODE: u64 = 0x1_0000;

    std::arch::global_asm!(
        ".pushsection .rodata",
        ".global coracle_probe_start, coracle_probe_fault, coracle_probe_trap, coracle_probe_end",
        "coracle_probe_start:",
        "mov al, 1",
        "out 0x80, al",
        "mov ebx, 0x40000000", // beyond the mapped 2 MiB
        "mov al, [rbx]",       // two bytes; the handler steps over them
        "mov al, 2",
        "out 0x80, al",
        "mov edi, 0x8000",
        "lock cmpxchg16b [rdi]",
        "mov al, 3",
        "out 0x80, al",
        "int3",
        "mov al, 4",
        "out 0x80, al",
        "mov ecx, 2000000",
        "2: dec ecx",
        "jnz 2b",
        "mov al, 5",
        "out 0x80, al",
        "hlt",
        "coracle_probe_fault:",
        "add rsp, 8", // error code
        "add qword ptr [rsp], 2",
        "iretq",
        "coracle_probe_trap:",
        "iretq",
        "coracle_probe_end:",
        ".popsection",
    );

    unsafe extern "C" {
        static coracle_probe_start: u8;
        static coracle_probe_fault: u8;
        static coracle_probe_trap: u8;
        static coracle_probe_end: u8;
    }

    const STEPS: [&str; 6] =
        ["its first instruction", "a page fault", "lock cmpxchg16b", "int3", "a loop", "hlt"];

    /// Returns the duration of the loop in milliseconds, or the reason why KVM cannot be used.
    pub(super) fn run(device: &Path) -> Result<u128, String> {
        let path = CString::new(device.as_os_str().as_bytes()).map_err(|e| e.to_string())?;
        let kvm = Kvm::new_with_path(path).map_err(|e| format!("{}: {e}", device.display()))?;
        let vm = kvm.create_vm().map_err(|e| format!("kvm creates no VM: {e}"))?;
        vm.set_tss_address(0xfffb_d000).map_err(|e| format!("kvm takes no TSS address: {e}"))?;
        let memory = Memory::map(&vm)?;
        memory.lay_out();
        let mut vcpu = vm.create_vcpu(0).map_err(|e| format!("kvm creates no CPU: {e}"))?;
        enter_long_mode(&vcpu).map_err(|e| format!("kvm takes no registers: {e}"))?;
        drive(&mut vcpu)
    }

    fn drive(vcpu: &mut VcpuFd) -> Result<u128, String> {
        let mut step = 0_usize;
        let mut entered = Instant::now();
        loop {
            let stopped = |what: String| {
                let at = STEPS.get(step).copied().unwrap_or("its end");
                Err(format!("kvm opens, but the guest stopped at {at}: {what}"))
            };
            match vcpu.run() {
                Ok(VcpuExit::IoOut(0x80, data)) => {
                    step = data.first().copied().unwrap_or(0).into();
                    if step == 4 {
                        entered = Instant::now();
                    }
                }
                Ok(VcpuExit::Hlt) if step == 5 => return Ok(entered.elapsed().as_millis()),
                Ok(VcpuExit::InternalError) => {
                    let run = vcpu.get_kvm_run();
                    // SAFETY: after KVM_EXIT_INTERNAL_ERROR this member of the union is valid.
                    let suberror = unsafe { run.__bindgen_anon_1.internal.suberror };
                    return stopped(format!("KVM_EXIT_INTERNAL_ERROR suberror {suberror}"));
                }
                Ok(other) => return stopped(format!("{other:?}")),
                Err(e) => return stopped(e.to_string()),
            }
        }
    }

    /// Anonymous memory that this process shares with the guest; never unmapped, because the process is short-lived.
    struct Memory(*mut u8);

    impl Memory {
        fn map(vm: &VmFd) -> Result<Self, String> {
            // SAFETY: a new anonymous mapping overlaps nothing.
            let at = unsafe {
                libc::mmap(
                    std::ptr::null_mut(),
                    MEMORY,
                    libc::PROT_READ | libc::PROT_WRITE,
                    libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                    -1,
                    0,
                )
            };
            if at == libc::MAP_FAILED {
                return Err(format!("map guest memory: {}", std::io::Error::last_os_error()));
            }
            let region = kvm_userspace_memory_region {
                slot: 0,
                flags: 0,
                guest_phys_addr: 0,
                memory_size: MEMORY as u64,
                userspace_addr: at as u64,
            };
            // SAFETY: the region is mapped for the life of the process.
            unsafe { vm.set_user_memory_region(region) }.map_err(|e| format!("kvm takes no memory: {e}"))?;
            Ok(Self(at.cast()))
        }

        fn write(&self, at: u64, bytes: &[u8]) {
            let at = usize::try_from(at).unwrap_or(MEMORY);
            assert!(at + bytes.len() <= MEMORY, "the layout fits the guest");
            // SAFETY: in bounds by the assertion; the CPU does not run yet.
            unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.0.add(at), bytes.len()) };
        }

        /// Writes the page tables that identity-map 2 MiB, a flat GDT, handlers for #BP and #PF, and the code.
        fn lay_out(&self) {
            let quad = |at: u64, value: u64| self.write(at, &value.to_le_bytes());
            quad(PAGE_TABLES, (PAGE_TABLES + 0x1000) | 3);
            quad(PAGE_TABLES + 0x1000, (PAGE_TABLES + 0x2000) | 3);
            quad(PAGE_TABLES + 0x2000, 0x83);
            quad(GDT + 8, 0x00af_9b00_0000_ffff);
            quad(GDT + 16, 0x00cf_9300_0000_ffff);
            // SAFETY: only addresses of linker symbols are taken; the bytes between them are read-only data.
            let (code, fault, trap) = unsafe {
                let start = &raw const coracle_probe_start;
                let length = (&raw const coracle_probe_end).offset_from_unsigned(start);
                (
                    std::slice::from_raw_parts(start, length),
                    (&raw const coracle_probe_fault).offset_from_unsigned(start),
                    (&raw const coracle_probe_trap).offset_from_unsigned(start),
                )
            };
            self.write(CODE, code);
            self.gate(3, CODE + trap as u64);
            self.gate(14, CODE + fault as u64);
            self.write(SCRATCH, &[0; 16]);
        }

        /// Writes a 64-bit interrupt gate (Intel SDM vol. 3, 6.14.1).
        fn gate(&self, vector: u64, handler: u64) {
            let low = (handler & 0xffff) | (8 << 16) | (0x8e00 << 32) | ((handler & 0xffff_0000) << 32);
            self.write(IDT + vector * 16, &low.to_le_bytes());
            self.write(IDT + vector * 16 + 8, &(handler >> 32).to_le_bytes());
        }
    }

    fn enter_long_mode(vcpu: &VcpuFd) -> Result<(), kvm_ioctls::Error> {
        let mut sregs = vcpu.get_sregs()?;
        let code = kvm_segment {
            limit: u32::MAX,
            selector: 8,
            type_: 11,
            present: 1,
            s: 1,
            l: 1,
            g: 1,
            ..Default::default()
        };
        let data = kvm_segment { selector: 16, type_: 3, l: 0, db: 1, ..code };
        sregs.cs = code;
        (sregs.ds, sregs.es, sregs.fs, sregs.gs, sregs.ss) = (data, data, data, data, data);
        (sregs.gdt.base, sregs.gdt.limit) = (GDT, 23);
        (sregs.idt.base, sregs.idt.limit) = (IDT, 0xfff);
        sregs.cr3 = PAGE_TABLES;
        sregs.cr4 = 1 << 5;
        sregs.cr0 = 0x8000_0011;
        sregs.efer = 0x500;
        vcpu.set_sregs(&sregs)?;
        vcpu.set_regs(&kvm_regs { rip: CODE, rsp: STACK, rflags: 2, ..Default::default() })
    }
}
