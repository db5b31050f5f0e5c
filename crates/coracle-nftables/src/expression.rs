//! Encodes statements of rules as the expressions that the kernel evaluates. Pure.
//!
//! An expression loads a field into a register, or evaluates registers. Values are in network byte order, as in packets, except
//! for numbers of the host.

use std::net::Ipv4Addr;

use crate::abi::*;
use crate::attributes::Attributes;
use crate::{DataType, Field, Relation, Statement, Value, Verdict};

/// Register that a field is loaded into, and at which a key begins. This register of 16 bytes, which all expressions accept,
/// begins with the first register of 4 bytes. Each value of a concatenated key takes one register of 4 bytes.
const FIRST: u32 = libc::NFT_REG_1.cast_unsigned();
const SECOND: u32 = libc::NFT_REG_2.cast_unsigned();
const VERDICT: u32 = libc::NFT_REG_VERDICT.cast_unsigned();

/// Encodes all expressions of a rule.
pub(crate) fn expressions(statements: &[Statement]) -> Attributes {
    let all = statements.iter().flat_map(statement);
    all.fold(Attributes::default(), |list, one| list.nest(NFTA_LIST_ELEM, one))
}

fn statement(statement: &Statement) -> Vec<Attributes> {
    match statement {
        Statement::Compare(field, relation, value) => {
            vec![load(*field, FIRST), compare(*relation, &bytes(value))]
        }
        Statement::Within(field, relation, network, prefix) => {
            let mask = u32::MAX.checked_shl(32 - u32::from(*prefix)).unwrap_or(0);
            let network = Ipv4Addr::from(u32::from(*network) & mask);
            vec![load(*field, FIRST), bitwise_and(&mask.to_be_bytes()), compare(*relation, &network.octets())]
        }
        Statement::AnyBit(field, bits) => {
            let none = compare(Relation::IsNot, &0_u32.to_ne_bytes());
            vec![load(*field, FIRST), bitwise_and(&bits.to_ne_bytes()), none]
        }
        Statement::Member(field, relation, set) => vec![load(*field, FIRST), lookup(set, *relation)],
        Statement::Lookup(key, map) => {
            let loads = key.iter().zip(key_registers()).map(|(field, register)| load(*field, register));
            loads.chain([dispatch(map)]).collect()
        }
        Statement::LimitConnections { key, set, above } => vec![load(*key, FIRST), limit(set, *above)],
        Statement::DestinationNat(address, port) => {
            let (address, port) = (value(&address.octets()), value(&port.to_be_bytes()));
            vec![immediate(FIRST, address), immediate(SECOND, port), destination_nat()]
        }
        Statement::Masquerade => vec![expression("masq", Attributes::default())],
        Statement::Verdict(verdict) => vec![immediate(VERDICT, self::verdict(verdict))],
    }
}

/// Registers for the values of a key, in order.
fn key_registers() -> impl Iterator<Item = u32> {
    std::iter::once(FIRST).chain(libc::NFT_REG32_01.cast_unsigned()..)
}

fn expression(name: &str, data: Attributes) -> Attributes {
    Attributes::default().string(NFTA_EXPR_NAME, name).nest(NFTA_EXPR_DATA, data)
}

fn load(field: Field, register: u32) -> Attributes {
    let payload = |base: i32, offset, length| {
        let place = Attributes::default()
            .number(NFTA_PAYLOAD_DREG, register)
            .number(NFTA_PAYLOAD_BASE, base.cast_unsigned())
            .number(NFTA_PAYLOAD_OFFSET, offset)
            .number(NFTA_PAYLOAD_LEN, length);
        expression("payload", place)
    };
    let meta = |key: i32| {
        let what = Attributes::default().number(NFTA_META_DREG, register);
        expression("meta", what.number(NFTA_META_KEY, key.cast_unsigned()))
    };
    let connection = |key: i32, original: bool| {
        let what = Attributes::default().number(NFTA_CT_DREG, register);
        let what = what.number(NFTA_CT_KEY, key.cast_unsigned());
        expression("ct", if original { what.bytes(NFTA_CT_DIRECTION, &[0]) } else { what })
    };
    let (link, network, transport) =
        (libc::NFT_PAYLOAD_LL_HEADER, libc::NFT_PAYLOAD_NETWORK_HEADER, libc::NFT_PAYLOAD_TRANSPORT_HEADER);
    match field {
        Field::InputInterface => meta(libc::NFT_META_IIFNAME),
        Field::InputGroup => meta(libc::NFT_META_IIFGROUP),
        Field::InetProtocol => meta(libc::NFT_META_L4PROTO),
        Field::EtherSource => payload(link, 6, 6),
        Field::EtherType => payload(link, 12, 2),
        Field::ArpSourceEther => payload(network, 8, 6),
        Field::ArpSourceIp => payload(network, 14, 4),
        Field::Ipv4Source => payload(network, 12, 4),
        Field::Ipv4Destination => payload(network, 16, 4),
        Field::IcmpType => payload(transport, 0, 1),
        Field::DestinationPort => payload(transport, 2, 2),
        Field::ConnectionState => connection(libc::NFT_CT_STATE, false),
        Field::ConnectionStatus => connection(libc::NFT_CT_STATUS, false),
        Field::OriginalDestination => connection(libc::NFT_CT_DST_IP, true),
        Field::OriginalDestinationPort => connection(libc::NFT_CT_PROTO_DST, true),
        Field::DestinationType => {
            let what = Attributes::default()
                .number(NFTA_FIB_DREG, register)
                .number(NFTA_FIB_RESULT, NFT_FIB_RESULT_ADDRTYPE)
                .number(NFTA_FIB_FLAGS, NFTA_FIB_F_DADDR);
            expression("fib", what)
        }
    }
}

fn value(bytes: &[u8]) -> Attributes {
    Attributes::default().bytes(NFTA_DATA_VALUE, bytes)
}

fn compare(relation: Relation, with: &[u8]) -> Attributes {
    let operation = match relation {
        Relation::Is => libc::NFT_CMP_EQ,
        Relation::IsNot => libc::NFT_CMP_NEQ,
    };
    let what = Attributes::default()
        .number(NFTA_CMP_SREG, FIRST)
        .number(NFTA_CMP_OP, operation.cast_unsigned())
        .nest(NFTA_CMP_DATA, value(with));
    expression("cmp", what)
}

fn bitwise_and(mask: &[u8; 4]) -> Attributes {
    let what = Attributes::default()
        .number(NFTA_BITWISE_SREG, FIRST)
        .number(NFTA_BITWISE_DREG, FIRST)
        .number(NFTA_BITWISE_LEN, 4)
        .nest(NFTA_BITWISE_MASK, value(mask))
        .nest(NFTA_BITWISE_XOR, value(&[0; 4]));
    expression("bitwise", what)
}

fn lookup(set: &str, relation: Relation) -> Attributes {
    let what = Attributes::default().string(NFTA_LOOKUP_SET, set).number(NFTA_LOOKUP_SREG, FIRST);
    let what = match relation {
        Relation::Is => what,
        Relation::IsNot => what.number(NFTA_LOOKUP_FLAGS, libc::NFT_LOOKUP_F_INV.cast_unsigned()),
    };
    expression("lookup", what)
}

fn dispatch(map: &str) -> Attributes {
    let what = Attributes::default().string(NFTA_LOOKUP_SET, map).number(NFTA_LOOKUP_SREG, FIRST);
    expression("lookup", what.number(NFTA_LOOKUP_DREG, VERDICT))
}

fn limit(set: &str, above: u32) -> Attributes {
    let count = Attributes::default()
        .number(NFTA_CONNLIMIT_COUNT, above)
        .number(NFTA_CONNLIMIT_FLAGS, NFT_CONNLIMIT_F_INV);
    let what = Attributes::default()
        .string(NFTA_DYNSET_SET_NAME, set)
        .number(NFTA_DYNSET_OP, libc::NFT_DYNSET_OP_ADD.cast_unsigned())
        .number(NFTA_DYNSET_SREG_KEY, FIRST)
        .nest(NFTA_DYNSET_EXPR, expression("connlimit", count));
    expression("dynset", what)
}

fn immediate(register: u32, data: Attributes) -> Attributes {
    let what = Attributes::default().number(NFTA_IMMEDIATE_DREG, register).nest(NFTA_IMMEDIATE_DATA, data);
    expression("immediate", what)
}

fn destination_nat() -> Attributes {
    let what = Attributes::default()
        .number(NFTA_NAT_TYPE, libc::NFT_NAT_DNAT.cast_unsigned())
        .number(NFTA_NAT_FAMILY, libc::NFPROTO_IPV4.cast_unsigned())
        .number(NFTA_NAT_REG_ADDR_MIN, FIRST)
        .number(NFTA_NAT_REG_PROTO_MIN, SECOND);
    expression("nat", what)
}

/// Encodes a verdict as data of an expression or an element.
pub(crate) fn verdict(verdict: &Verdict) -> Attributes {
    let (code, chain) = match verdict {
        Verdict::Accept => (libc::NF_ACCEPT, None),
        Verdict::Drop => (libc::NF_DROP, None),
        Verdict::Jump(chain) => (libc::NFT_JUMP, Some(chain)),
        Verdict::Goto(chain) => (libc::NFT_GOTO, Some(chain)),
    };
    let code = Attributes::default().number(NFTA_VERDICT_CODE, code.cast_unsigned());
    let whole = chain.into_iter().fold(code, |code, chain| code.string(NFTA_VERDICT_CHAIN, chain));
    Attributes::default().nest(NFTA_DATA_VERDICT, whole)
}

/// Encodes a key as data of an element: each value is padded to whole registers.
pub(crate) fn key(values: &[Value]) -> Attributes {
    let padded = values.iter().flat_map(|value| {
        let mut bytes = bytes(value);
        // A key of a single value is not padded.
        if values.len() > 1 {
            bytes.resize(bytes.len().next_multiple_of(REGISTER), 0);
        }
        bytes
    });
    value(&padded.collect::<Vec<_>>())
}

/// Size of a 4-byte register (`NFT_REG32_SIZE`).
const REGISTER: usize = 4;

/// nft's number of a type, and the length of its values in bytes.
fn data_type(data_type: DataType) -> (u32, usize) {
    match data_type {
        DataType::Ipv4Address => (TYPE_IPV4_ADDR, 4),
        DataType::InetProtocol => (TYPE_INET_PROTOCOL, 1),
        DataType::InetService => (TYPE_INET_SERVICE, 2),
        DataType::InterfaceName => (TYPE_IFNAME, libc::IFNAMSIZ),
    }
}

/// Type and length of a key. Several types are concatenated in nft's encoding.
pub(crate) fn key_type(types: &[DataType]) -> (u32, u32) {
    let parts = types.iter().map(|one| data_type(*one));
    let (number, length) = parts.fold((0, 0), |(number, length), (one, bytes)| {
        let bytes = if types.len() > 1 { bytes.next_multiple_of(REGISTER) } else { bytes };
        (number << TYPE_BITS | one, length + bytes)
    });
    (number, u32::try_from(length).unwrap_or(u32::MAX))
}

/// Bytes of a value, in the form in which a field is loaded.
fn bytes(value: &Value) -> Vec<u8> {
    match value {
        Value::Ipv4Address(address) => address.octets().to_vec(),
        Value::EtherAddress(address) => address.to_vec(),
        Value::EtherType(number) | Value::InetService(number) => number.to_be_bytes().to_vec(),
        Value::InetProtocol(number) | Value::IcmpType(number) => vec![*number],
        Value::Number(number) => number.to_ne_bytes().to_vec(),
        Value::InterfaceName(name) => {
            let mut bytes = name.as_bytes().to_vec();
            bytes.resize(libc::IFNAMSIZ, 0);
            bytes
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_of_several_values_fill_registers() {
        for (types, values, number, length) in [
            (vec![DataType::Ipv4Address], vec![Value::Ipv4Address([10, 0, 0, 1].into())], TYPE_IPV4_ADDR, 4),
            (vec![DataType::InterfaceName], vec![Value::InterfaceName("ct0".to_owned())], TYPE_IFNAME, 16),
            (
                vec![DataType::InetProtocol, DataType::InetService],
                vec![Value::InetProtocol(6), Value::InetService(80)],
                0x30d,
                8,
            ),
        ] {
            assert_eq!(key_type(&types), (number, length), "{types:?}");
            // Two attribute headers precede the value.
            let data = key(&values).into_bytes();
            assert_eq!(data.len(), 4 + usize::try_from(length).unwrap(), "{types:?}");
        }
    }
}
