//! Program in place of this driver's VMM that reports what it sees.

fn main() -> std::process::ExitCode {
    coracle_hypervisor_testing::stand_in::view::main()
}
