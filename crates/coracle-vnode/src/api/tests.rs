//! Tests of the API over the network, with a real API server for reviews. VMMs are in memory, and real in one test.

mod clients;
mod kubectl;
mod pods;
mod rights;
mod streams;
mod vm;
mod world;
