#!/bin/sh
# The compiler for our own crates when they are fuzzed (RUSTC_WORKSPACE_WRAPPER): libFuzzer is told where an input leads,
# on the stable toolchain, and what comes from elsewhere is not measured.
case " $* " in
    *" --crate-name coracle"*)
        exec "$@" -C passes=sancov-module -C codegen-units=1 \
            -C llvm-args=-sanitizer-coverage-level=4 \
            -C llvm-args=-sanitizer-coverage-inline-8bit-counters \
            -C llvm-args=-sanitizer-coverage-pc-table \
            -C llvm-args=-sanitizer-coverage-trace-compares
        ;;
    *) exec "$@" ;;
esac
