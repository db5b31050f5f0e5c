//! `coracle market …`, and the operator's flags for BidNodes.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};
use coracle_auction::Price;

use super::{Format, WorkerThreads};

#[derive(Args, Debug)]
pub struct MarketArgs {
    #[command(subcommand)]
    pub command: MarketCommand,
}

#[derive(Subcommand, Debug)]
pub enum MarketCommand {
    /// Serve the market: auction, journal, gRPC and HTTP
    Serve(Box<MarketServeArgs>),
    /// Show prices
    Price(PriceArgs),
    /// Show prices of the past
    History(HistoryArgs),
    /// Show the demand by tenth of the list price
    Book(OneMarketArgs),
    /// List bids
    Bids(BidsArgs),
    /// Place, change or cancel bids
    Bid(BidArgs),
    /// Explain the state of a bid or allocation, and the limit that would win
    Explain(ExplainIdArgs),
    /// List allocations
    Allocations(BidsArgs),
    /// Recommend a limit price that would have kept nodes for a given time
    Advise(AdviseArgs),
    /// Show what a bid would get, without placing it
    Simulate(SimulateArgs),
    /// List lots and their capacity
    Lots(OptionalMarketArgs),
    /// List charges
    Charges(ChargesArgs),
    /// Show a tenant's spending cap and what is committed
    Budget(PlainArgs),
    /// Show all markets: price, free slots, demand
    Top(PlainArgs),
    /// Accept no bids in a market until resume
    Halt(OneMarketArgs),
    /// Accept bids again
    Resume(OneMarketArgs),
    /// Replay a market's journal and compare the results
    Verify(OneMarketArgs),
    /// Create, list or revoke tokens
    Token(TokenArgs),
}

/// Address of the market, identity of the caller, and output format.
#[derive(Args, Debug, Clone)]
pub struct At {
    /// URL of the market's gRPC service
    #[arg(long, env = "CORACLE_MARKET_URL", default_value = "http://127.0.0.1:7700", value_name = "URL")]
    pub url: String,
    /// Token of the tenant
    #[arg(
        long,
        env = "CORACLE_MARKET_TOKEN",
        default_value = "",
        hide_env_values = true,
        hide_default_value = true
    )]
    pub token: String,
    /// Trust certificates of this authority, a PEM file; required for https
    #[arg(long, env = "CORACLE_MARKET_CA", value_name = "FILE")]
    pub ca: Option<PathBuf>,
    /// Act for this tenant [default: the token's own]
    #[arg(
        long,
        env = "CORACLE_MARKET_TENANT",
        default_value = "",
        hide_default_value = true,
        value_name = "NAME"
    )]
    pub tenant: String,
    /// Output format: table, wide, json, yaml, name or jsonpath=TEMPLATE
    #[arg(short, long, default_value = "table", value_name = "FORMAT", hide_possible_values = true)]
    pub output: Format,
}

#[derive(Args, Debug)]
pub struct PlainArgs {
    #[command(flatten)]
    pub at: At,
}

#[derive(Args, Debug)]
pub struct PriceArgs {
    /// Instance type [default: all]
    pub instance_type: Option<String>,
    /// Region
    #[arg(long)]
    pub region: Option<String>,
    /// Watch price changes
    #[arg(short, long)]
    pub watch: bool,
    #[command(flatten)]
    pub at: At,
}

#[derive(Args, Debug)]
pub struct OneMarketArgs {
    /// Instance type
    pub instance_type: String,
    /// Region
    pub region: String,
    #[command(flatten)]
    pub at: At,
}

#[derive(Args, Debug)]
pub struct OptionalMarketArgs {
    /// Only of this market: TYPE/REGION
    pub market: Option<String>,
    #[command(flatten)]
    pub at: At,
}

#[derive(Args, Debug)]
pub struct HistoryArgs {
    /// Instance type
    pub instance_type: String,
    /// Region
    pub region: String,
    /// From this time, as 2026-01-31T12:00:00Z [default: a day ago]
    #[arg(long, value_name = "TIME")]
    pub from: Option<jiff::Timestamp>,
    /// Until this time [default: now]
    #[arg(long, value_name = "TIME")]
    pub to: Option<jiff::Timestamp>,
    /// Interval of one line, like 1h; 0s: one line per call
    #[arg(long, default_value = "15m", value_name = "DURATION")]
    pub step: jiff::SignedDuration,
    #[command(flatten)]
    pub at: At,
}

#[derive(Args, Debug)]
pub struct BidsArgs {
    /// Only of this BidNode; --tenant then names the cluster [default: kubernetes]
    #[arg(long, value_name = "NAMESPACE/NAME")]
    pub bidnode: Option<String>,
    /// Also bids and allocations that have ended
    #[arg(short, long)]
    pub all: bool,
    #[command(flatten)]
    pub at: At,
}

#[derive(Args, Debug)]
pub struct BidArgs {
    #[command(subcommand)]
    pub command: BidCommand,
}

#[derive(Subcommand, Debug)]
pub enum BidCommand {
    /// Place a bid
    Place(PlaceArgs),
    /// Change a bid's limit or quantity
    Amend(AmendArgs),
    /// Cancel the open part of a bid
    Cancel(CancelArgs),
}

fn price(text: &str) -> Result<Price, String> {
    Price::parse(text).map_err(|e| e.to_string())
}

#[derive(Args, Debug)]
pub struct PlaceArgs {
    /// Instance type
    pub instance_type: String,
    /// Region
    pub region: String,
    /// Limit price, in US$ per node-hour
    #[arg(long, value_parser = price, value_name = "DOLLARS")]
    pub limit: Price,
    /// Number of nodes
    #[arg(long, default_value_t = 1)]
    pub quantity: u32,
    /// Fewest nodes to take at once
    #[arg(long, default_value_t = 1, value_name = "QUANTITY")]
    pub min_fill: u32,
    /// Owner of the bid
    #[arg(long, default_value = "cli")]
    pub owner: String,
    /// Idempotency key: a second bid with the same key is the same bid
    #[arg(long, default_value = "", hide_default_value = true)]
    pub key: String,
    /// Only if the owner's version is this one
    #[arg(long, value_name = "VERSION")]
    pub if_version: Option<u64>,
    /// Cancel the bid unless it is renewed within this time, like 1h
    #[arg(long, value_name = "DURATION")]
    pub lease: Option<jiff::SignedDuration>,
    #[command(flatten)]
    pub at: At,
}

#[derive(Args, Debug)]
pub struct AmendArgs {
    /// Id of the bid
    pub bid: String,
    /// Limit price, in US$ per node-hour
    #[arg(long, value_parser = price, value_name = "DOLLARS")]
    pub limit: Option<Price>,
    /// Number of unfinished allocations
    #[arg(long)]
    pub quantity: Option<u32>,
    /// Only if the owner's version is this one
    #[arg(long, value_name = "VERSION")]
    pub if_version: Option<u64>,
    #[command(flatten)]
    pub at: At,
}

#[derive(Args, Debug)]
pub struct CancelArgs {
    /// Id of the bid
    pub bid: String,
    /// Only if the owner's version is this one
    #[arg(long, value_name = "VERSION")]
    pub if_version: Option<u64>,
    #[command(flatten)]
    pub at: At,
}

#[derive(Args, Debug)]
pub struct ExplainIdArgs {
    /// Id of a bid or allocation
    pub id: String,
    #[command(flatten)]
    pub at: At,
}

#[derive(Args, Debug)]
pub struct AdviseArgs {
    /// Instance type
    pub instance_type: String,
    /// Region
    pub region: String,
    /// Time that the nodes are needed, like 6h
    #[arg(long = "for", value_name = "DURATION", default_value = "6h")]
    pub window: jiff::SignedDuration,
    /// Required probability, like 95%
    #[arg(long, value_parser = percent, value_name = "PERCENT", default_value = "95%")]
    pub survive: u32,
    #[command(flatten)]
    pub at: At,
}

/// Parses `95%` or `99.5%`, in thousandths.
fn percent(text: &str) -> Result<u32, String> {
    let digits = text.strip_suffix('%').unwrap_or(text);
    let (whole, tenth) = digits.split_once('.').unwrap_or((digits, "0"));
    let permille = format!("{whole}{tenth}").parse::<u32>().ok().filter(|p| tenth.len() == 1 && *p <= 1000);
    permille.ok_or_else(|| format!("{text} must be a percentage with at most one decimal, like 95%"))
}

#[derive(Args, Debug)]
pub struct SimulateArgs {
    /// Instance type
    pub instance_type: String,
    /// Region
    pub region: String,
    /// Limit price, in US$ per node-hour
    #[arg(long, value_parser = price, value_name = "DOLLARS")]
    pub limit: Price,
    /// Number of nodes
    #[arg(long, default_value_t = 1)]
    pub quantity: u32,
    /// Fewest nodes to take at once
    #[arg(long, default_value_t = 1, value_name = "QUANTITY")]
    pub min_fill: u32,
    #[command(flatten)]
    pub at: At,
}

#[derive(Args, Debug)]
pub struct ChargesArgs {
    /// From this time, as 2026-01-31T12:00:00Z [default: the beginning]
    #[arg(long, value_name = "TIME")]
    pub from: Option<jiff::Timestamp>,
    /// Until this time [default: now]
    #[arg(long, value_name = "TIME")]
    pub to: Option<jiff::Timestamp>,
    #[command(flatten)]
    pub at: At,
}

#[derive(Args, Debug)]
pub struct TokenArgs {
    #[command(subcommand)]
    pub command: TokenCommand,
}

#[derive(Subcommand, Debug)]
pub enum TokenCommand {
    /// Create a token for a tenant; its secret is shown only once
    Mint(TokenMintArgs),
    /// List tokens, without their secrets
    List(TokenListArgs),
    /// Revoke a token; the market refuses it immediately
    Revoke(TokenRevokeArgs),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum TokenScope {
    /// Prices, bids and charges of the tenant
    Read,
    /// Bids
    Trade,
    /// Capacity
    Supply,
    /// Markets, tenants and tokens
    Admin,
    /// Journals
    Audit,
}

impl TokenScope {
    /// Returns the name of the scope in the market's API.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Trade => "trade",
            Self::Supply => "supply",
            Self::Admin => "admin",
            Self::Audit => "audit",
        }
    }
}

#[derive(Args, Debug)]
pub struct TokenMintArgs {
    /// Name of the tenant; a new tenant is created
    #[arg(value_name = "TENANT")]
    pub name: String,
    /// What the token allows; may be repeated
    #[arg(long = "scope", value_name = "SCOPE", value_delimiter = ',', required = true)]
    pub scopes: Vec<TokenScope>,
    #[command(flatten)]
    pub at: At,
}

#[derive(Args, Debug)]
pub struct TokenListArgs {
    /// Only tokens of this tenant
    #[arg(value_name = "TENANT")]
    pub name: Option<String>,
    #[command(flatten)]
    pub at: At,
}

#[derive(Args, Debug)]
pub struct TokenRevokeArgs {
    /// Id of the token, as listed
    pub id: String,
    #[command(flatten)]
    pub at: At,
}

#[derive(Args, Debug)]
pub struct MarketServeArgs {
    #[command(flatten)]
    pub threads: WorkerThreads,
    /// Journal: sqlite:FILE or postgres://… [default: market.db of the state directory]
    #[arg(long, env = "CORACLE_MARKET_STORE", value_name = "ADDRESS")]
    pub store: Option<String>,
    /// Address of gRPC
    #[arg(long, env = "CORACLE_MARKET_GRPC", value_name = "ADDR", default_value = "127.0.0.1:7700")]
    pub grpc: SocketAddr,
    /// Address of HTTP and JSON
    #[arg(long, env = "CORACLE_MARKET_HTTP", value_name = "ADDR", default_value = "127.0.0.1:7701")]
    pub http: SocketAddr,
    /// Certificate of gRPC and HTTP, a PEM file; reloaded when it changes
    #[arg(long, env = "CORACLE_MARKET_TLS_CERT", value_name = "FILE", requires = "tls_key")]
    pub tls_cert: Option<PathBuf>,
    /// Key of the certificate, a PEM file
    #[arg(long, env = "CORACLE_MARKET_TLS_KEY", value_name = "FILE", requires = "tls_cert")]
    pub tls_key: Option<PathBuf>,
    /// Require client certificates of this authority from suppliers, a PEM file
    #[arg(long, env = "CORACLE_MARKET_TLS_CLIENT_CA", value_name = "FILE", requires = "tls_cert")]
    pub tls_client_ca: Option<PathBuf>,
    /// Serve without TLS on addresses other than loopback, where the network can read tokens
    #[arg(long, env = "CORACLE_MARKET_PLAINTEXT", conflicts_with = "tls_cert")]
    pub plaintext: bool,
    /// Address of metrics and health
    #[arg(long, env = "CORACLE_MARKET_ADMIN_LISTEN", value_name = "ADDR")]
    pub admin_listen: Option<SocketAddr>,
    /// Regions that get the default catalogue; requests that name no region mean the first
    #[arg(
        long = "region",
        env = "CORACLE_MARKET_REGION",
        value_name = "NAME",
        value_delimiter = ',',
        default_value = "local"
    )]
    pub regions: Vec<String>,
    /// Token of an administrator, in addition to the stored ones
    #[arg(long, env = "CORACLE_MARKET_ADMIN_TOKEN", hide_env_values = true, value_name = "TOKEN")]
    pub admin_token: Option<String>,
    /// How long the writer of a shared store may be silent before another replica takes over
    #[arg(long, env = "CORACLE_MARKET_LEASE", default_value = "10s", value_name = "DURATION")]
    pub lease: jiff::SignedDuration,
    /// Address at which other replicas of a shared store reach this one [default: that of --grpc and --http]
    #[arg(long, env = "CORACLE_MARKET_ADVERTISE", value_name = "IP")]
    pub advertise: Option<IpAddr>,
    /// Let service accounts of the cluster of this kubeconfig trade, each for its namespace; in-cluster: the cluster that this
    /// Pod runs in
    #[arg(long, env = "CORACLE_MARKET_ACCOUNTS", value_name = "KUBECONFIG")]
    pub accounts: Option<String>,
    /// Name of that cluster at the market: tenants are NAME/NAMESPACE
    #[arg(long, env = "CORACLE_MARKET_CLUSTER", value_name = "NAME", default_value = "kubernetes")]
    pub cluster: String,
    /// Service account that trades for all namespaces of the cluster
    #[arg(
        long,
        env = "CORACLE_MARKET_OPERATOR",
        value_name = "NAMESPACE/NAME",
        default_value = "coracle-system/coracle-bidnode"
    )]
    pub operator: String,
    /// Log level or filter
    #[arg(long, env = "CORACLE_MARKET_LOG", default_value = "info")]
    pub log: String,
}

/// Flags of the BidNode controller.
#[derive(Args, Debug, Clone)]
pub struct BidFlags {
    /// URL of the market's gRPC service, or embedded for a market in this process
    #[arg(long, env = "CORACLE_OPERATOR_MARKET", value_name = "URL", default_value = EMBEDDED, help_heading = BIDS)]
    pub market: String,
    /// Trust market certificates of this authority, a PEM file; required for https
    #[arg(long, env = "CORACLE_OPERATOR_MARKET_CA", value_name = "FILE", help_heading = BIDS)]
    pub market_ca: Option<PathBuf>,
    /// Token of the cluster's tenant at the market
    #[arg(long, env = "CORACLE_OPERATOR_MARKET_TOKEN", value_name = "TOKEN", default_value = "", hide_env_values = true, hide_default_value = true, help_heading = BIDS)]
    pub market_token: String,
    /// File that the token is read from repeatedly: a service account token for the audience coracle-market
    #[arg(long, env = "CORACLE_OPERATOR_MARKET_TOKEN_FILE", value_name = "FILE", help_heading = BIDS)]
    pub market_token_file: Option<PathBuf>,
    /// Name of the cluster at the market: tenants are NAME/NAMESPACE
    #[arg(long, env = "CORACLE_OPERATOR_MARKET_CLUSTER", value_name = "NAME", default_value = "kubernetes", help_heading = BIDS)]
    pub market_cluster: String,
    /// Journal of an embedded market
    #[arg(long, env = "CORACLE_OPERATOR_MARKET_STORE", value_name = "ADDRESS", default_value = "sqlite:market.db", help_heading = BIDS)]
    pub market_store: String,
    /// Address of gRPC of an embedded market
    #[arg(long, env = "CORACLE_OPERATOR_MARKET_LISTEN", value_name = "ADDR", default_value = "127.0.0.1:7700", help_heading = BIDS)]
    pub market_listen: SocketAddr,
    /// Region of BidNodes without a region
    #[arg(long, env = "CORACLE_OPERATOR_MARKET_REGION", value_name = "NAME", help_heading = BIDS)]
    pub market_region: Option<String>,
    /// Let BidNodes set this label or taint key of Kubernetes on their nodes; may be repeated
    #[arg(long = "bidnode-label", env = "CORACLE_OPERATOR_BIDNODE_LABEL", value_name = "KEY", value_delimiter = ',', help_heading = BIDS)]
    pub bidnode_labels: Vec<String>,
    /// Commands per second to the market
    #[arg(long, env = "CORACLE_OPERATOR_MARKET_RATE", value_name = "COUNT", default_value_t = 50, help_heading = BIDS)]
    pub market_rate: u32,
}

const BIDS: &str = "BidNodes";
/// Value of `--market` that selects a market in the operator's process.
pub const EMBEDDED: &str = "embedded";

#[derive(Args, Debug)]
pub struct CrdArgs {
    #[command(subcommand)]
    pub command: CrdCommand,
}

#[derive(Subcommand, Debug)]
pub enum CrdCommand {
    /// Print the definitions as YAML
    Print {
        /// Also let BidNodes have this instance type
        #[arg(long = "add-instance-type", value_name = "NAME")]
        add: Vec<String>,
    },
}
