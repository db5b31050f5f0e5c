//! Everything that is kept of the corpus goes through its target again.

use coracle_fuzz::{TARGETS, kept};

#[test]
fn corpus_and_crashes_are_replayed() {
    for target in TARGETS {
        let inputs = kept(&target).unwrap();
        assert!(inputs.len() >= 2, "{} has no corpus", target.name);
        for (path, bytes) in inputs {
            // The name of the input that breaks it is the last that is said.
            println!("{}", path.display());
            (target.run)(&bytes);
        }
    }
}

/// Cut off anywhere, and with each byte turned: a small part of what the soak does, always.
#[test]
fn inputs_that_are_nearly_right_are_no_panic() {
    for target in TARGETS {
        let mut inputs = kept(&target).unwrap();
        inputs.truncate(8);
        for (_, bytes) in inputs {
            let step = (bytes.len() / 16).max(1);
            for at in (0..bytes.len()).step_by(step) {
                (target.run)(&bytes[..at]);
                let mut turned = bytes.clone();
                turned[at] ^= 0xff;
                (target.run)(&turned);
            }
        }
    }
}
