//! Compiles a list of rules to classic BPF (kernel, Documentation/userspace-api/seccomp_filter.rst; linux/filter.h). Pure.
//!
//! ```text
//! architecture? ─no─▶ kill     number: of another ABI? ─▶ ENOSYS
//! rule 1: number? conditions? ─yes─▶ its action     rule 2 …     the profile's own action
//! ```

use super::SeccompError;

/// Most instructions of a program (BPF_MAXINSNS).
const LENGTH_MAX: usize = 4096;
/// Bit of the system call numbers of x32, an ABI that shares the architecture with x86_64 (asm/unistd.h).
const X32: u32 = 0x4000_0000;
/// Audit architecture of this processor, and therefore of the guest (linux/audit.h).
const ARCHITECTURE: u32 = if cfg!(target_arch = "aarch64") { 0xc000_00b7 } else { 0xc000_003e };
const ENOSYS: u32 = 38;

/// Offsets in struct seccomp_data.
const NUMBER_AT: u32 = 0;
const ARCHITECTURE_AT: u32 = 4;
const ARGUMENTS_AT: u32 = 16;

const LOAD: u16 = 0x20;
const AND: u16 = 0x54;
const EQUAL: u16 = 0x15;
const GREATER: u16 = 0x25;
const NOT_LESS: u16 = 0x35;
const RETURN: u16 = 0x06;

/// Return values of a filter (linux/seccomp.h).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Action(u32);

impl Action {
    pub(super) const ALLOW: Self = Self(0x7fff_0000);
    pub(super) const LOG: Self = Self(0x7ffc_0000);
    pub(super) const TRAP: Self = Self(0x0003_0000);
    pub(super) const KILL_THREAD: Self = Self(0);
    pub(super) const KILL_PROCESS: Self = Self(0x8000_0000);

    pub(super) fn errno(number: u32) -> Self {
        Self(0x0005_0000 | (number & 0xffff))
    }

    pub(super) fn trace(number: u32) -> Self {
        Self(0x7ff0_0000 | (number & 0xffff))
    }
}

/// Unsigned comparison of a 64-bit argument.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Test {
    Equal(u64),
    Unequal(u64),
    /// The masked bits of the argument equal the value.
    Masked {
        mask: u64,
        value: u64,
    },
    Greater(u64),
    NotLess(u64),
    Less(u64),
    NotGreater(u64),
}

/// Condition on one argument, 0 to 5.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Condition {
    pub(super) argument: u32,
    pub(super) test: Test,
}

/// Rule: the action for a system call for which all conditions hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Rule {
    pub(super) number: u32,
    pub(super) conditions: Vec<Condition>,
    pub(super) action: Action,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Instruction {
    code: u16,
    jump_true: u8,
    jump_false: u8,
    value: u32,
}

/// Target of a jump in a condition.
#[derive(Clone, Copy)]
enum To {
    Next,
    /// End of the condition, which holds.
    Pass,
    /// End of the rule.
    Fail,
}

/// Assembles the program of the rules, in their order; `otherwise` applies to calls without a rule. Instructions have 8 bytes,
/// little-endian.
pub(super) fn assemble(rules: &[Rule], otherwise: Action) -> Result<Vec<u8>, SeccompError> {
    let jump = |code, value, jump_true, jump_false| Instruction { code, jump_true, jump_false, value };
    let load = |at| jump(LOAD, at, 0, 0);
    let give = |action: Action| jump(RETURN, action.0, 0, 0);
    let mut program = vec![
        load(ARCHITECTURE_AT),
        jump(EQUAL, ARCHITECTURE, 1, 0),
        give(Action::KILL_PROCESS),
        load(NUMBER_AT),
        jump(NOT_LESS, X32, 0, 1),
        give(Action::errno(ENOSYS)),
    ];
    for rule in rules {
        let mut body: Vec<Instruction> = Vec::new();
        let blocks: Vec<_> = rule.conditions.iter().map(|condition| block(*condition)).collect();
        // Number of instructions between a block and the end of the rule: the following blocks and the return.
        let mut after: usize = blocks.iter().map(Vec::len).sum::<usize>() + 1;
        for block in blocks {
            after -= block.len();
            let length = block.len();
            body.extend(block.into_iter().enumerate().map(|(at, (code, value, yes, no))| {
                let left = length - at - 1;
                let distance = |to| match to {
                    To::Next => 0,
                    To::Pass => left,
                    To::Fail => left + after,
                };
                let short = |to| u8::try_from(distance(to)).unwrap_or(u8::MAX);
                jump(code, value, short(yes), short(no))
            }));
        }
        body.push(give(rule.action));
        if !rule.conditions.is_empty() {
            body.push(load(NUMBER_AT)); // a condition has loaded an argument
        }
        let behind = u8::try_from(body.len()).unwrap_or(u8::MAX);
        program.push(jump(EQUAL, rule.number, 0, behind));
        program.extend(body);
    }
    program.push(give(otherwise));
    if program.len() > LENGTH_MAX {
        return Err(SeccompError::TooLong(program.len()));
    }
    Ok(program.into_iter().flat_map(bytes).collect())
}

fn bytes(instruction: Instruction) -> [u8; 8] {
    let [code_low, code_high] = instruction.code.to_le_bytes();
    let [a, b, c, d] = instruction.value.to_le_bytes();
    [code_low, code_high, instruction.jump_true, instruction.jump_false, a, b, c, d]
}

/// Returns the instructions of one condition. BPF has 32-bit registers: the high half is tested first.
fn block(condition: Condition) -> Vec<(u16, u32, To, To)> {
    let low_at = ARGUMENTS_AT + 8 * condition.argument;
    let load_low = (LOAD, low_at, To::Next, To::Next);
    let load_high = (LOAD, low_at + 4, To::Next, To::Next);
    let halves = |value: u64| ((value >> 32) as u32, (value & 0xffff_ffff) as u32);
    match condition.test {
        Test::Equal(value) => {
            let (high, low) = halves(value);
            vec![load_high, (EQUAL, high, To::Next, To::Fail), load_low, (EQUAL, low, To::Pass, To::Fail)]
        }
        Test::Unequal(value) => {
            let (high, low) = halves(value);
            vec![load_high, (EQUAL, high, To::Next, To::Pass), load_low, (EQUAL, low, To::Fail, To::Pass)]
        }
        Test::Masked { mask, value } => {
            let ((mask_high, mask_low), (high, low)) = (halves(mask), halves(value));
            vec![
                load_high,
                (AND, mask_high, To::Next, To::Next),
                (EQUAL, high, To::Next, To::Fail),
                load_low,
                (AND, mask_low, To::Next, To::Next),
                (EQUAL, low, To::Pass, To::Fail),
            ]
        }
        Test::Greater(value) => compare_ordered(value, (load_high, load_low), (GREATER, To::Pass, To::Fail)),
        Test::NotLess(value) => compare_ordered(value, (load_high, load_low), (NOT_LESS, To::Pass, To::Fail)),
        Test::Less(value) => compare_ordered(value, (load_high, load_low), (NOT_LESS, To::Fail, To::Pass)),
        Test::NotGreater(value) => {
            compare_ordered(value, (load_high, load_low), (GREATER, To::Fail, To::Pass))
        }
    }
}

type Step = (u16, u32, To, To);

/// Returns an ordered comparison. The high half decides, unless it is equal; `above` is the target if it is greater.
fn compare_ordered(
    value: u64,
    (load_high, load_low): (Step, Step),
    (code, above, below): (u16, To, To),
) -> Vec<Step> {
    let (high, low) = ((value >> 32) as u32, (value & 0xffff_ffff) as u32);
    vec![
        load_high,
        (GREATER, high, above, To::Next),
        (EQUAL, high, To::Next, below),
        load_low,
        (code, low, above, below),
    ]
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// Returns what the kernel would return for a call with this program.
    pub(in super::super) fn run(program: &[u8], number: u32, arguments: [u64; 6]) -> u32 {
        run_on(program, ARCHITECTURE, number, arguments)
    }

    fn run_on(program: &[u8], architecture: u32, number: u32, arguments: [u64; 6]) -> u32 {
        let mut data = Vec::new();
        data.extend(number.to_le_bytes());
        data.extend(architecture.to_le_bytes());
        data.extend([0; 8]);
        arguments.iter().for_each(|argument| data.extend(argument.to_le_bytes()));
        let (mut at, mut accumulator) = (0, 0_u32);
        loop {
            let step = &program[at * 8..at * 8 + 8];
            let code = u16::from_le_bytes([step[0], step[1]]);
            let value = u32::from_le_bytes(step[4..8].try_into().unwrap());
            let jump = |holds: bool| usize::from(if holds { step[2] } else { step[3] });
            at += 1;
            match code {
                LOAD => {
                    let from = value as usize;
                    accumulator = u32::from_le_bytes(data[from..from + 4].try_into().unwrap());
                }
                AND => accumulator &= value,
                EQUAL => at += jump(accumulator == value),
                GREATER => at += jump(accumulator > value),
                NOT_LESS => at += jump(accumulator >= value),
                RETURN => return value,
                other => panic!("{other:#x}"),
            }
        }
    }

    fn first(value: u64) -> [u64; 6] {
        [value, 0, 0, 0, 0, 0]
    }

    #[test]
    fn argument_tests_compare_64_bits() {
        let edges = [0, 1, 2, 0xffff_ffff, 1 << 32, (1 << 32) + 1, (2 << 32) + 1, u64::MAX];
        for value in edges {
            for argument in edges {
                for (test, want) in [
                    (Test::Equal(value), argument == value),
                    (Test::Unequal(value), argument != value),
                    (
                        Test::Masked { mask: 0x1_0000_0001, value: value & 0x1_0000_0001 },
                        argument & 0x1_0000_0001 == value & 0x1_0000_0001,
                    ),
                    (Test::Greater(value), argument > value),
                    (Test::NotLess(value), argument >= value),
                    (Test::Less(value), argument < value),
                    (Test::NotGreater(value), argument <= value),
                ] {
                    let conditions = vec![Condition { argument: 0, test }];
                    let rule = Rule { number: 7, conditions, action: Action::errno(1) };
                    let program = assemble(&[rule], Action::ALLOW).unwrap();
                    let got = run(&program, 7, first(argument)) == Action::errno(1).0;
                    assert_eq!(got, want, "{test:?} {argument:#x}");
                }
            }
        }
    }

    #[test]
    fn rules_are_tried_in_order() {
        let on = |argument, value| Condition { argument, test: Test::Equal(value) };
        let rules = [
            Rule { number: 7, conditions: vec![on(0, 1), on(5, 2)], action: Action::errno(1) },
            Rule { number: 7, conditions: vec![on(0, 3)], action: Action::errno(2) },
            Rule { number: 8, conditions: vec![], action: Action::KILL_PROCESS },
        ];
        let program = assemble(&rules, Action::ALLOW).unwrap();
        for (number, arguments, want) in [
            (7, [1, 0, 0, 0, 0, 2], Action::errno(1)),
            (7, [1, 0, 0, 0, 0, 3], Action::ALLOW),
            (7, first(3), Action::errno(2)),
            (8, first(0), Action::KILL_PROCESS),
            (9, first(0), Action::ALLOW),
            (X32 + 7, first(0), Action::errno(ENOSYS)),
        ] {
            assert_eq!(run(&program, number, arguments), want.0, "{number} {arguments:?}");
        }
        assert_eq!(
            run_on(&program, 0x4000_0003, 9, first(0)),
            Action::KILL_PROCESS.0,
            "another architecture"
        );
    }

    #[test]
    fn program_longer_than_the_kernel_takes_is_refused() {
        let rule = Rule { number: 1, conditions: vec![], action: Action::ALLOW };
        assert!(matches!(assemble(&vec![rule; 2100], Action::ALLOW), Err(SeccompError::TooLong(_))));
    }
}
