//! `coracle`: virtual machines for Kubernetes, and the command line for both.
//!
//! One binary has all daemons and commands. `coracle-cli` has the grammar and the short-lived commands; the modules of
//! `daemon/` are long-lived and own their tasks.

mod daemon;
mod doctor;
mod epoch_env;
mod push_layout;
mod reference;
mod uninstall;

use std::process::ExitCode;

use clap::Parser;

use coracle_cli::cli::{self, Cli, Command, MarketCommand, RegistryCommand};
use coracle_cli::commands::power::Verb;
use coracle_cli::{commands, error};

fn main() -> ExitCode {
    // Installs the TLS provider of the process before any code makes a TLS configuration.
    let first = rustls::crypto::aws_lc_rs::default_provider().install_default();
    debug_assert!(first.is_ok(), "nothing installed a TLS provider before main");
    error::install();
    let mut args: Vec<_> = std::env::args_os().collect();
    cli::drop_in(&mut args);
    let cli = Cli::parse_from(args);
    let mut runtime = match cli.command.daemon() {
        Some(threads) => {
            daemon::keep_files_private();
            daemon::memory::map_large_buffers();
            let mut runtime = tokio::runtime::Builder::new_multi_thread();
            if let Some(count) = threads.count {
                runtime.worker_threads(count.get());
            }
            runtime
        }
        None => tokio::runtime::Builder::new_current_thread(),
    };
    let outcome = match runtime.enable_all().build() {
        Ok(runtime) => {
            let outcome = runtime.block_on(Box::pin(run(cli)));
            coracle_telemetry::flush_traces();
            outcome
        }
        Err(e) => Err(miette::miette!("start the runtime: {e}")),
    };
    error::exit_code(outcome)
}

/// Returns the exit code of the command: the guest's own for `run` and `exec`.
async fn run(cli: Cli) -> miette::Result<u8> {
    let global = cli.global;
    match cli.command {
        Command::Node(args) => daemon::node::run(&global, *args).await.map(|()| 0),
        Command::Routes(args) => daemon::pod_routes::run(args).await.map(|()| 0),
        Command::Operator(args) => daemon::operator::run(*args).await.map(|()| 0),
        Command::AgentForge(args) => daemon::agent_forge::run(*args).await.map(|()| 0),
        Command::CocoonOperator(args) => daemon::cocoon::run_operator(*args).await.map(|()| 0),
        Command::CocoonWebhook(args) => daemon::cocoon::run_webhook(*args).await.map(|()| 0),
        Command::Up(args) => daemon::up::run(&global, *args).await.map(|()| 0),
        Command::Down(args) => daemon::down::run(&global, args).await.map(|()| 0),
        Command::Registry(args) => match args.command {
            RegistryCommand::Serve(args) => daemon::registry::run(&global, *args).await.map(|()| 0),
            command => commands::epoch::run(&global, command).await,
        },
        Command::PushLayout(args) => push_layout::run(args).await,
        Command::KvmProbe { device } => doctor::kvm_probe(&device),
        Command::Doctor(args) => doctor::run(&global, args).await,
        Command::Uninstall(args) => uninstall::run(&global, args).await,
        Command::Run(args) => commands::run::run(&global, *args).await,
        Command::Exec(args) => commands::exec::run(&global, args).await,
        Command::Ps(args) => commands::vm::ps(&global, args).await,
        Command::Inspect(args) => commands::vm::inspect(&global, args).await,
        Command::Start(args) => commands::power::run(&global, Verb::Start, args).await,
        Command::Pause(args) => commands::power::run(&global, Verb::Pause, args).await,
        Command::Resume(args) => commands::power::run(&global, Verb::Resume, args).await,
        Command::Hibernate(args) => commands::power::run(&global, Verb::Hibernate, args).await,
        Command::Stop(args) => commands::power::stop(&global, args).await,
        Command::Rm(args) => commands::vm::rm(&global, args).await,
        Command::Wait(args) => commands::vm::wait(&global, args).await,
        Command::Explain(args) => commands::explain::run(&global, args).await,
        Command::Events(args) => commands::events::run(&global, args).await,
        Command::Reference { manual } => reference::run(manual).await,
        Command::Logs(args) => commands::logs::run(&global, args).await,
        Command::Console(args) => commands::console::run(&global, args).await,
        Command::Cp(args) => commands::cp::run(&global, args).await,
        Command::PortForward(args) => commands::port_forward::run(&global, args).await,
        Command::Vnc(args) => commands::vnc::run(&global, args).await,
        Command::Snapshot(args) => commands::snapshot::run(&global, args.command).await,
        Command::Restore(args) => commands::snapshot::restore(&global, args).await,
        Command::Fork(args) => commands::snapshot::fork(&global, args).await,
        Command::Commit(args) => commands::image::commit(&global, args).await,
        Command::Volume(args) => commands::volume::run(&global, args.command).await,
        Command::Template(args) => commands::template::run(&global, args.command).await,
        Command::Market(args) => match args.command {
            MarketCommand::Serve(args) => daemon::market::run(&global, *args).await.map(|()| 0),
            command => coracle_cli_market::run(command).await,
        },
        Command::Crd(args) => commands::crd(args.command),
        Command::AgentPool(args) => commands::agentpool::run(&global, args.command).await,
        Command::Image(args) => commands::image::run(&global, args.command).await,
        Command::Completion { shell } => commands::completion(shell),
    }
}
