//! Reference of the command line, from the clap definitions.

use std::fmt::Write;

use clap::{Arg, Command, CommandFactory};

use super::GENERATED;
use coracle_cli::cli::Cli;

/// Returns the whole page. Pure.
pub(super) fn page() -> String {
    let mut command = Cli::command();
    command.build();
    let mut text = format!("{GENERATED}\n# Command line\n\n");
    text += "Data goes to stdout, everything else to stderr. Exit codes: 0 ok, 1 failed, 2 usage, 3 not found,\n\
        4 conflict or exists, 5 unsupported on this host, 6 timed out, 7 forbidden, 130 interrupted.\n\
        `run` and `exec` end with the guest's own code; 125 is ours, 126 not executable, 127 not found.\n\n\
        Every command understands:\n\n";
    let globals: Vec<_> = command.get_arguments().filter(|a| a.is_global_set()).cloned().collect();
    table(globals.iter(), &mut text);
    section(&command, "coracle", &mut text);
    text
}

fn section(command: &Command, path: &str, text: &mut String) {
    for sub in command.get_subcommands().filter(|c| !c.is_hide_set() && c.get_name() != "help") {
        let path = format!("{path} {}", sub.get_name());
        let about = sub.get_about().map(ToString::to_string).unwrap_or_default();
        append(text, format_args!("\n## `{path}`\n\n{about}.\n"));
        if sub.get_subcommands().next().is_none() {
            let usage = sub.clone().render_usage().to_string();
            let usage = usage.trim_start_matches("Usage: ").replace("\n       ", "\n");
            append(text, format_args!("\n```text\n{usage}\n```\n"));
        }
        let own: Vec<_> = sub.get_arguments().filter(|a| !a.is_global_set() && !a.is_hide_set()).collect();
        let own: Vec<_> =
            own.into_iter().filter(|a| !matches!(a.get_id().as_str(), "help" | "version")).collect();
        if !own.is_empty() {
            text.push('\n');
            table(own.into_iter(), text);
        }
        section(sub, &path, text);
    }
}

fn table<'a>(args: impl Iterator<Item = &'a Arg>, text: &mut String) {
    text.push_str("| argument | environment | default | meaning |\n|---|---|---|---|\n");
    for arg in args {
        let env = arg.get_env().map(|e| format!("`{}`", e.to_string_lossy())).unwrap_or_default();
        let flag = !arg.get_action().takes_values();
        let defaults: Vec<_> = arg.get_default_values().iter().map(|v| v.to_string_lossy()).collect();
        let default = match defaults.join(" ") {
            d if d.is_empty() || flag => String::new(),
            d => format!("`{d}`"),
        };
        append(text, format_args!("| `{}` | {env} | {default} | {} |\n", spelling(arg), meaning(arg)));
    }
}

/// Returns the spelling of an argument: `-o, --output <FORMAT>`.
fn spelling(arg: &Arg) -> String {
    let names = arg.get_value_names().unwrap_or_default();
    let names: Vec<_> = names.iter().map(|n| format!("<{n}>")).collect();
    let values = if arg.get_action().takes_values() { names.join(" ") } else { String::new() };
    let flags: Vec<_> = arg
        .get_short()
        .map(|c| format!("-{c}"))
        .into_iter()
        .chain(arg.get_long().map(|long| format!("--{long}")))
        .collect();
    let words = format!("{} {values}", flags.join(", "));
    words.trim().replace('|', "\\|")
}

fn meaning(arg: &Arg) -> String {
    let mut words = arg.get_help().map(ToString::to_string).unwrap_or_default();
    let values: Vec<_> = arg
        .get_possible_values()
        .into_iter()
        .filter(|v| !v.is_hide_set())
        .map(|v| format!("`{}`", v.get_name()))
        .collect();
    if !values.is_empty() && arg.get_action().takes_values() && !arg.is_hide_possible_values_set() {
        words += &format!(" ({})", values.join(", "));
    }
    words.replace('|', "\\|").replace('\n', " ")
}

fn append(text: &mut String, what: std::fmt::Arguments<'_>) {
    let _strings_take_everything = text.write_fmt(what);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn visible_commands_have_a_described_section() {
        let page = page();
        for sub in Cli::command().get_subcommands().filter(|c| !c.is_hide_set()) {
            let title = format!("## `coracle {}`\n\n", sub.get_name());
            let (_, after) = page.split_once(&title).unwrap_or_else(|| panic!("{title} is missing"));
            assert!(after.lines().next().unwrap().len() > 5, "{title} has no words");
        }
        assert!(page.contains("| `-n, --namespace <NAME>` |"), "{page}");
        assert!(page.contains("`CORACLE_NODE_ADMIN_LISTEN`"));
        assert!(page.contains("## `coracle image ls`"));
        assert!(!page.contains("kvm-probe") && !page.contains("--legacy"), "what is hidden stays so");
    }
}
