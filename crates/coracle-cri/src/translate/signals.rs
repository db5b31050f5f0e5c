//! Signal names and numbers. Pure.

use coracle_proto::cri::Signal;

/// Numbers by name (signal(7), x86 and Arm).
const NUMBERS: [(&str, i32); 34] = [
    ("HUP", 1),
    ("INT", 2),
    ("QUIT", 3),
    ("ILL", 4),
    ("TRAP", 5),
    ("ABRT", 6),
    ("IOT", 6),
    ("BUS", 7),
    ("FPE", 8),
    ("KILL", 9),
    ("USR1", 10),
    ("SEGV", 11),
    ("USR2", 12),
    ("PIPE", 13),
    ("ALRM", 14),
    ("TERM", 15),
    ("STKFLT", 16),
    ("CHLD", 17),
    ("CLD", 17),
    ("CONT", 18),
    ("STOP", 19),
    ("TSTP", 20),
    ("TTIN", 21),
    ("TTOU", 22),
    ("URG", 23),
    ("XCPU", 24),
    ("XFSZ", 25),
    ("VTALRM", 26),
    ("PROF", 27),
    ("WINCH", 28),
    ("IO", 29),
    ("POLL", 29),
    ("PWR", 30),
    ("SYS", 31),
];

/// Returns the number of a CRI signal; `None` for the default of the runtime.
pub(crate) fn number(signal: Signal) -> Option<i32> {
    parse(signal.as_str_name()).filter(|_| signal != Signal::RuntimeDefault)
}

/// Parses the name or number of a signal, as in images: `SIGQUIT`, `QUIT`, `3`.
pub(crate) fn parse(text: &str) -> Option<i32> {
    if let Ok(number) = text.parse::<i32>() {
        return Some(number).filter(|number| (1..=64).contains(number));
    }
    let upper = text.to_ascii_uppercase();
    let name = upper.strip_prefix("SIG").unwrap_or(&upper);
    NUMBERS.iter().find(|(known, _)| *known == name).map(|(_, number)| *number)
}

/// Returns the CRI signal of a number.
pub(crate) fn signal(number: i32) -> Signal {
    let name = NUMBERS.iter().find(|(_, known)| *known == number).map(|(name, _)| format!("SIG{name}"));
    name.and_then(|name| Signal::from_str_name(&name)).unwrap_or(Signal::RuntimeDefault)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signals_have_names_and_numbers() {
        for (text, want) in
            [("SIGQUIT", Some(3)), ("quit", Some(3)), ("9", Some(9)), ("0", None), ("65", None), ("", None)]
        {
            assert_eq!(parse(text), want, "{text}");
        }
        assert_eq!(number(Signal::Sigterm), Some(15));
        assert_eq!(number(Signal::RuntimeDefault), None);
        assert_eq!(
            (signal(15), signal(6), signal(99)),
            (Signal::Sigterm, Signal::Sigabrt, Signal::RuntimeDefault)
        );
    }
}
