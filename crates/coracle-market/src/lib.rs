//! The market service.
