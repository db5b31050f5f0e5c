//! Commands `coracle market …` over the market's gRPC API: prices, bids, allocations, charges, tokens. Their grammar is in
//! `coracle-cli`.

mod look;
mod token;
mod trade;

use std::time::Duration;

use coracle_auction::Price;
use serde_json::Value;
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint};
use tonic::{Code, Request, Status};

use coracle_cli::cli::{At, Format, MarketCommand};
use coracle_cli::error::{Failure, exit};
use coracle_cli::output::{self, Columns};

/// Time limit of a connection attempt to the market.
const DIAL: Duration = Duration::from_secs(5);
const CALL: Duration = Duration::from_secs(30);

/// Runs a command. Does nothing for `serve`, which is a daemon of the binary.
///
/// # Errors
/// The market does not answer, or it refuses the request.
pub async fn run(command: MarketCommand) -> miette::Result<u8> {
    match command {
        MarketCommand::Serve(_) => {}
        MarketCommand::Price(args) => look::price(args).await?,
        MarketCommand::History(args) => look::history(args).await?,
        MarketCommand::Book(args) => look::book(args).await?,
        MarketCommand::Advise(args) => look::advise(args).await?,
        MarketCommand::Simulate(args) => look::simulate(args).await?,
        MarketCommand::Lots(args) => look::lots(args).await?,
        MarketCommand::Top(args) => look::top(args).await?,
        MarketCommand::Bids(args) => trade::bids(args).await?,
        MarketCommand::Bid(args) => trade::bid(args.command).await?,
        MarketCommand::Explain(args) => trade::explain(args).await?,
        MarketCommand::Allocations(args) => trade::allocations(args).await?,
        MarketCommand::Charges(args) => trade::charges(args).await?,
        MarketCommand::Budget(args) => trade::budget(args).await?,
        MarketCommand::Halt(args) => trade::halt(args, true).await?,
        MarketCommand::Resume(args) => trade::halt(args, false).await?,
        MarketCommand::Verify(args) => trade::verify(args).await?,
        MarketCommand::Token(args) => token::run(args.command).await?,
    }
    Ok(0)
}

/// Connection to the market, with the credentials of its calls.
struct Connection {
    channel: Channel,
    at: At,
}

impl Connection {
    async fn open(at: &At) -> Result<Self, Failure> {
        let unusable = |e: &dyn std::error::Error| {
            Failure::new("COR-MKT-001", format!("no market answers at {}: {}", at.url, chain(e)))
                .help("name it with --url or $CORACLE_MARKET_URL; `coracle market serve` starts one")
                .exit(exit::TIMED_OUT)
        };
        let endpoint = Endpoint::from_shared(at.url.clone())
            .map_err(|e| Failure::usage(format!("--url {}: {e}", at.url)))?;
        let mut endpoint = endpoint.connect_timeout(DIAL).timeout(CALL);
        if at.url.starts_with("https:") {
            endpoint = endpoint
                .tls_config(client_tls_config(at).await?)
                .map_err(|e| Failure::usage(format!("--ca: {}", chain(&e))))?;
        }
        let channel = endpoint.connect().await;
        Ok(Self { channel: channel.map_err(|e| unusable(&e))?, at: at.clone() })
    }

    fn authorised_request<T>(&self, message: T) -> Result<Request<T>, Failure> {
        let mut request = Request::new(message);
        if !self.at.token.is_empty() {
            let token = format!("Bearer {}", self.at.token).parse();
            let token = token.map_err(|_| Failure::usage("--token: a token has letters and digits"))?;
            request.metadata_mut().insert("authorization", token);
        }
        Ok(request)
    }
}

/// Returns a TLS configuration that trusts only the authority of `--ca`.
async fn client_tls_config(at: &At) -> Result<ClientTlsConfig, Failure> {
    let Some(file) = &at.ca else {
        return Err(Failure::usage("https needs the authority of the market's certificate")
            .help("name its file with --ca or $CORACLE_MARKET_CA"));
    };
    let pem = tokio::fs::read(file).await;
    let pem = pem.map_err(|e| Failure::usage(format!("--ca {}: {e}", file.display())))?;
    Ok(ClientTlsConfig::new().ca_certificate(Certificate::from_pem(pem)))
}

fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        text = format!("{text}: {cause}");
        next = cause.source();
    }
    text
}

/// Converts an error of the market to a failure: exit code 1 for a rule that refuses, 4 for a conflict, 6 for no answer.
fn market_failure(status: Status) -> Failure {
    let known = status.metadata().get("coracle-code").is_some();
    let code = status.code();
    let mut failure = Failure::from(status);
    failure.exit = match code {
        Code::Unavailable | Code::DeadlineExceeded if !known => exit::TIMED_OUT,
        Code::Cancelled if !known => exit::TIMED_OUT,
        Code::FailedPrecondition | Code::ResourceExhausted | Code::Unavailable => exit::FAILED,
        _ => failure.exit,
    };
    match code {
        Code::Unauthenticated => failure.help("give a token with --token or $CORACLE_MARKET_TOKEN"),
        Code::PermissionDenied => failure.help("the token's scopes are read, trade, supply, admin or audit"),
        Code::Aborted => failure.help("another client changed it: look at the bids and try again"),
        Code::NotFound => failure.help("list what there is: coracle market top, coracle market bids -a"),
        _ => failure,
    }
}

/// Row of a table, and the same data as a document.
struct Item {
    name: String,
    cells: Vec<String>,
    /// Additional cells of `-o wide`.
    wide: Vec<String>,
    document: Value,
}

/// Prints a list in any format.
fn show(
    format: &Format,
    kind: &str,
    header: &[&str],
    wide: &[&str],
    items: Vec<Item>,
) -> Result<(), Failure> {
    match format {
        Format::Table | Format::Wide => {
            let is_wide = *format == Format::Wide;
            let more = if is_wide { wide } else { &[] };
            let mut table = Columns::new(&[header, more].concat());
            for item in &items {
                let more: &[String] = if is_wide { &item.wide } else { &[] };
                table.row(&[&item.cells, more].concat());
            }
            table.print()
        }
        Format::Name => output::write(&items.iter().map(|i| format!("{}\n", i.name)).collect::<String>()),
        Format::Json | Format::Yaml | Format::JsonPath(_) => {
            output::list(format, kind, items.into_iter().map(|i| i.document).collect())
        }
    }
}

/// Formats dollars as the HTTP API does: decimal text, never a number.
fn dollars(micros: i64) -> String {
    Price::micros(micros).to_string()
}

/// Formats a time to the second; empty for no time.
fn time(ms: i64) -> String {
    match jiff::Timestamp::from_millisecond(ms) {
        Ok(at) if ms > 0 => format!("{at:.0}"),
        _ => String::new(),
    }
}

fn market(instance_type: &str, region: &str) -> String {
    format!("{instance_type}/{region}")
}
