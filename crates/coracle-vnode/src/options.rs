//! Settings of a virtual node.
