//! Converts text and named keys to key events of RFB (RFC 6143, 7.5.4) with X keysyms. Names are those of Packer's boot
//! commands. Pure.

/// Keysym of the left Shift key.
const SHIFT: u32 = 0xffe1;
/// Characters other than capital letters that need Shift on a US keyboard. VMMs translate keysyms to keys of a US keyboard.
const SHIFTED: &str = "~!@#$%^&*()_+{}|:\"<>?";

/// Named keys and their keysyms (X11, `keysymdef.h`).
const NAMED: [(&str, u32); 41] = [
    ("bs", 0xff08),
    ("tab", 0xff09),
    ("enter", 0xff0d),
    ("return", 0xff0d),
    ("esc", 0xff1b),
    ("home", 0xff50),
    ("left", 0xff51),
    ("up", 0xff52),
    ("right", 0xff53),
    ("down", 0xff54),
    ("pageUp", 0xff55),
    ("pageDown", 0xff56),
    ("end", 0xff57),
    ("insert", 0xff63),
    ("menu", 0xff67),
    ("del", 0xffff),
    ("spacebar", 0x20),
    ("lt", 0x3c),
    ("f1", 0xffbe),
    ("f2", 0xffbf),
    ("f3", 0xffc0),
    ("f4", 0xffc1),
    ("f5", 0xffc2),
    ("f6", 0xffc3),
    ("f7", 0xffc4),
    ("f8", 0xffc5),
    ("f9", 0xffc6),
    ("f10", 0xffc7),
    ("f11", 0xffc8),
    ("f12", 0xffc9),
    ("leftShift", SHIFT),
    ("rightShift", 0xffe2),
    ("leftCtrl", 0xffe3),
    ("rightCtrl", 0xffe4),
    ("leftMeta", 0xffe7),
    ("rightMeta", 0xffe8),
    ("leftAlt", 0xffe9),
    ("rightAlt", 0xffea),
    ("leftSuper", 0xffeb),
    ("rightSuper", 0xffec),
    ("capsLock", 0xffe5),
];

/// Press or release of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct KeyEvent {
    pub(crate) keysym: u32,
    pub(crate) down: bool,
}

/// Key events of a text: `<enter>` presses a named key, `<leftCtrlOn>` and `<leftCtrlOff>` hold and release one.
///
/// # Errors
/// The unknown name, or the bracket that is not closed.
pub(crate) fn parse(text: &str) -> Result<Vec<KeyEvent>, String> {
    let mut events = Vec::new();
    let mut rest = text;
    while let Some(letter) = rest.chars().next() {
        let Some(named) = rest.strip_prefix('<') else {
            character(letter, &mut events);
            rest = rest.get(letter.len_utf8()..).unwrap_or_default();
            continue;
        };
        let (name, after) = named.split_once('>').ok_or_else(|| format!("{rest:?} has no end"))?;
        key(name, &mut events)?;
        rest = after;
    }
    Ok(events)
}

fn key(name: &str, events: &mut Vec<KeyEvent>) -> Result<(), String> {
    let find = |name: &str| NAMED.iter().find(|(known, _)| *known == name).map(|(_, keysym)| *keysym);
    if let Some(keysym) = find(name) {
        press(keysym, events);
        return Ok(());
    }
    let held =
        |end: &str, down| name.strip_suffix(end).and_then(find).map(|keysym| KeyEvent { keysym, down });
    let event = held("On", true).or_else(|| held("Off", false));
    events.push(event.ok_or_else(|| format!("unknown key <{name}>; \"<\" itself is <lt>"))?);
    Ok(())
}

fn press(keysym: u32, events: &mut Vec<KeyEvent>) {
    let needs_shift = char::from_u32(keysym).is_some_and(|c| c.is_ascii_uppercase() || SHIFTED.contains(c));
    let shift = |down| needs_shift.then_some(KeyEvent { keysym: SHIFT, down });
    events.extend(shift(true));
    events.extend([true, false].map(|down| KeyEvent { keysym, down }));
    events.extend(shift(false));
}

fn character(letter: char, events: &mut Vec<KeyEvent>) {
    let code = u32::from(letter);
    let keysym = match letter {
        '\n' | '\r' => 0xff0d,
        '\t' => 0xff09,
        // A Latin-1 character is its own keysym, other characters have an additional bit (X11, appendix A).
        _ if code < 0x100 => code,
        _ => 0x0100_0000 | code,
    };
    press(keysym, events);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Formats events as `+keysym` for a press and `-keysym` for a release.
    fn events_text(text: &str) -> String {
        let events = parse(text).unwrap();
        let shown = events.iter().map(|e| format!("{}{:x}", if e.down { '+' } else { '-' }, e.keysym));
        shown.collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn text_becomes_key_events() {
        for (text, want) in [
            ("a", "+61 -61"),
            ("A", "+ffe1 +41 -41 -ffe1"),
            ("?", "+ffe1 +3f -3f -ffe1"),
            ("<lt>", "+ffe1 +3c -3c -ffe1"),
            (">", "+ffe1 +3e -3e -ffe1"),
            ("\n", "+ff0d -ff0d"),
            ("<f12><down>", "+ffc9 -ffc9 +ff54 -ff54"),
            ("<leftCtrlOn>c<leftCtrlOff>", "+ffe3 +63 -63 -ffe3"),
            ("é€", "+e9 -e9 +10020ac -10020ac"),
            ("", ""),
        ] {
            assert_eq!(events_text(text), want, "{text}");
        }
        assert!(parse("<Enter>").is_err() && parse("<aOn>").is_err() && parse("a<").is_err());
    }
}
