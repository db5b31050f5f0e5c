//! Manual pages of the commands, from the clap definitions.

use std::io;

use clap::Command;
use clap_mangen::Man;

/// Returns the file name and text of a page for each command that help shows. `command` must be built.
pub(super) fn pages(command: &Command) -> io::Result<Vec<(String, String)>> {
    let mut pages = Vec::new();
    let mut waiting = vec![command];
    while let Some(command) = waiting.pop() {
        let mut text = Vec::new();
        Man::new(command.clone()).render(&mut text)?;
        let text = String::from_utf8(text).map_err(io::Error::other)?;
        let name = command.get_display_name().unwrap_or(command.get_name());
        pages.push((format!("{name}.1"), text));
        waiting
            .extend(command.get_subcommands().filter(|sub| !sub.is_hide_set() && sub.get_name() != "help"));
    }
    pages.sort();
    Ok(pages)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn visible_commands_have_manual_pages() {
        let mut root = Command::new("coracle")
            .about("VMs")
            .subcommand(Command::new("image").subcommand(Command::new("ls").about("List images")))
            .subcommand(Command::new("probe").hide(true));
        root.build();
        let pages = pages(&root).unwrap();
        let names: Vec<_> = pages.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["coracle-image-ls.1", "coracle-image.1", "coracle.1"]);
        assert!(pages[0].1.contains("List images"), "{}", pages[0].1);
    }
}
