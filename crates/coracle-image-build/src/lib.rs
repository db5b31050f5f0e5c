//! Builds disk images by operating a machine as a person would: keys typed at its screen and its serial console, waits for what
//! they show, screenshots.
//!
//! ```text
//! build file ─▶ steps ─┬─ keys ────────▶ screen of the VMM (RFB), before any system is up
//!                      ├─ waits ───────◀ its frames: still, or like a picture
//!                      └─ text, waits ─▶ serial console
//! ```
//! An installer asks on the screen; a system without the guest agent is logged in at the serial console. What this crate never
//! does: start a machine. Its caller has one, and says when it is off.

mod build_file;
mod keys;
mod run;
mod screen;
mod serial;

pub use build_file::{Area, BuildFile, Picture, Step};
pub use run::{Machine, StepError, run};
pub use screen::{Frame, Screen, ScreenError};
pub use serial::Serial;
